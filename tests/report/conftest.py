import browsing
import pytest
from folders import write_demo, write_every_task, write_run


@pytest.fixture
def run_folder(tmp_path):
    def make(name="run", **kwargs):
        return write_run(tmp_path / "runs" / name, **kwargs)

    return make


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="session")
def every_task(tmp_path_factory):
    return write_every_task(tmp_path_factory.mktemp("every"))


@pytest.fixture(scope="session")
def browser():
    driver = browsing.start()
    yield driver
    driver.quit()
