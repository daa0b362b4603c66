"""Every command on damaged folders: once in `make test-all`, for any time with `make fuzz`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from abuse.cases import CASES

pytestmark = pytest.mark.slow

FUZZ = Path(__file__).parent / "fuzz.py"


def test_every_command_on_some_damage_and_under_some_fault(tmp_path):
    """In a separate process, whose forks do not have pytest's threads; the same damage every time. A command under a
    fault is refused in one line, and the result afterwards is the undisturbed one, to the bit."""
    command = [sys.executable, FUZZ, "--each", "1", "--faults", "4", "--out", tmp_path / "found.json"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert (tmp_path / "found.json").exists(), ended.stdout + ended.stderr
    result = json.loads((tmp_path / "found.json").read_text())
    assert result["failures"] == []
    assert set(result["by command"]) == {"settings", *(case.name for case in CASES)}
    faults = result["faults"]
    assert {name: lines for name, lines in faults.items() if lines and not lines[0].startswith("skipped")} == {}
    assert len(faults) > 25


PLANTED = {
    "a traceback": ("1/0", "traceback: ZeroDivisionError"),
    "a process": ("import subprocess; subprocess.run(['true'])", "event: subprocess.Popen"),
    "a shell": ("import os; os.system('true')", "event: os.system"),
    "a file elsewhere": ("open('/etc/passwd').read()", "event: reads /etc/passwd"),
    "a file written elsewhere": ("open('../stray', 'w').close()", "event: writes"),
    "a hang": ("while True: pass", "hang: took more than 1 s"),
    "memory": ("kept = b'x' * 3 * 10**9; import time; time.sleep(9)", "hang: took more than 2 GB"),
    "an exit that nobody expects": ("raise SystemExit(7)", "traceback: "),
    "two lines": ("import sys; print('a\\nb', file=sys.stderr); raise SystemExit(2)", "message: expected one line"),
    "a line without a key": (
        "import sys; print('canonlm: no', file=sys.stderr); raise SystemExit(2)",
        "message: names",
    ),
    "control characters": ("print('\\x1b[2J')", "terminal: '\\x1b' in standard output"),
    "a process that stays": ("import os, time; os.fork() or time.sleep(60)", "leftovers: 1 processes"),
    "something temporary": ("open('.a.tmp-1', 'w').close()", "leftovers: .a.tmp-1"),
    "another result": ("print('other')", "difference: another result"),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The oracle's complaints about each program. They run like the fuzzer's forks, without pytest's threads."""
    place = tmp_path_factory.mktemp("planted")
    (place / "program.py").write_text(PROGRAM.format(tests=str(Path(__file__).parents[1]), planted=PLANTED))
    done = subprocess.run([sys.executable, "program.py"], cwd=place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", PLANTED)
def test_the_oracle_reports_wrong_outcomes(seen, name):
    """Otherwise a fuzzer that finds nothing would prove nothing."""
    assert any(complaint.startswith(PLANTED[name][1]) for complaint in seen[name]), seen[name]


def test_the_oracle_accepts_correct_outcomes(seen):
    assert seen["nothing"] == seen["a refusal"] == []


PROGRAM = """
import json
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from abuse import forks, oracle
from abuse.cases import Case
from abuse.damage import Damage

def work(code):
    exec(code, {{}})
    return 0

planted = {{name: code for name, (code, _) in {planted!r}.items()}}
planted["nothing"] = "open('in the folder', 'w').close()"
planted["a refusal"] = "import sys; print('canonlm: a.b: expected c, got d', file=sys.stderr); raise SystemExit(2)"
case, done, seen = Case("planted", "", "", "", sealed="*"), Damage("bytes", "a flipped bit", ("file",)), {{}}
Path("notes").mkdir()
for name, code in planted.items():
    folder = Path(name).absolute()
    folder.mkdir()
    limit = 1.0 if name == "a hang" else forks.SECONDS
    outcome = forks.run(lambda: work(code), folder, Path("notes").absolute(), limit)
    seen[name] = list(oracle.complaints(case, outcome, folder, done, {{"stdout": ""}}))
print(json.dumps(seen))
"""
