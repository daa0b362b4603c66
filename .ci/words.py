#!/usr/bin/env python3
"""Plain English: phrases and names that readers stumble over, and what to write in their place.

Reads the docs, the texts at the repository's root, the examples, the package's sources and the tests; exit code 1 if a
line has one of them.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ["*.md", "examples/*.py", "src/*.py", "src/*.js", "src/*.html", "src/*.yaml", "tests/*.py"]
LEFT_OUT = ("docs/claims.md",)
PHRASES = {
    r"\b(Asked( for)?|Chosen|Compared|Counted|Drawn|Evaluated|Graded|Kept|Left out|Measured|Meant|Refused|Skipped)"
    r" (is|are) (an?|all|one|only|some\w*|the|what)\b": "the subject first: 'The newest three are kept.'",
    r"\banew\b": "again",
    r"\bfor ever\b": "forever",
    r"(?<![Tt]here\s)\b(is|are) no (?!good|less|longer|more|one|such)[a-z]+": "is not a",
    r"\b(is|are) said by\b": "what decides it, as the subject",
    r"\b(exact|same|test|the|training|true) laws?\b|\blaws? of\b": "distribution",
    r"\bmended\b": "fixed",
    r"\bone's own\b": "your, the user's",
    r"\botherwise than\b": "differently from",
    r"\bso many\b": "that many, or the number of",
    r"\bwhole or not there\b": "complete or absent",
    r"\bhowever (many|often)\b": "any number of",
    r"\b(of|in) like length\b": "similar",
    r"\bsigns? of life\b": "heartbeat",
    r"\b(is|are) told (every|of|why)\b": "is called with, gets",
    r"\b(what|where (it|they)|which|that) (is|are) none\b(?! of)": "is not a",
    r"\bwhomever\b": "any",
}
LEFT_OUT_OF_CODE = ("src/canonlm/cli/", "tests/models/test_self_contained.py")
CODE = {
    r"(?m)^ *(found|heard|here|laws?|least|most|said|asked|told|wanted|whole)\b(: .+)? = ": "what the variable holds",
    r'"""(Does|Is it|Of|What) ': "what the thing is or does: 'The answers of …', 'Whether …'",
}
TESTS = {
    r"def test_\w*?_?(laws?|anew|as_asked|as_ever|for_ever|nobody|ones_own|said|says_so|told)(?=_|\()": "plain words",
    r"def test_\w*_(is|are)_no_(?!longer)": "is_not_a",
    r"def test_\w*(cannot_be|that_(is|are)_none)\(": "invalid_…, unknown_…",
}


def main() -> int:
    names = subprocess.run(["git", "ls-files", *FILES], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    hits = 0
    for name in names.splitlines():
        text = (ROOT / name).read_text()
        code = CODE if name.endswith(".py") else {}
        tests = TESTS if name.startswith("tests/") else {}
        for phrases, left_out in ((PHRASES, LEFT_OUT), (code, LEFT_OUT_OF_CODE), (tests, ())):
            for phrase, better in phrases.items() if not name.startswith(left_out) else ():
                for match in re.finditer(phrase, text):
                    print(f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0].strip()!r}; write: {better}")
                    hits += 1
    return min(hits, 1)


if __name__ == "__main__":
    sys.exit(main())
