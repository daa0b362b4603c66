"""Messages of one line, and tasks from labels such as `copying N=6 test_lengths=[x1,x2]`."""

import re
from contextlib import contextmanager

import pytest
import yaml

from canonlm import tasks


@contextmanager
def refused(message):
    """Expect a ValueError with this message of one line; `...` stands for any text in it."""
    with pytest.raises(ValueError) as error:
        yield
    assert re.fullmatch(".*".join(map(re.escape, message.split("..."))), str(error.value)), error.value


def task_of(label):
    name, *settings = label.split()
    pairs = (setting.split("=", 1) for setting in settings)
    return tasks.get(name, **{key: yaml.safe_load(value) for key, value in pairs})
