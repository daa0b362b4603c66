import pytest
from folders import write_demo, write_run


@pytest.fixture
def run_folder(tmp_path):
    def make(name="run", **kwargs):
        return write_run(tmp_path / "runs" / name, **kwargs)

    return make


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("demo"))
