"""The run that others are compared with."""

import pytest

from canonlm.train.loop import train


@pytest.fixture(scope="session")
def reference(tiny, tmp_path_factory):
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("reference")
    train(tiny(), folder)
    return folder
