"""Prepared folders, written without the code that prepares them."""

import pytest
from prepared_folders import write_prepared


@pytest.fixture(scope="session")
def prepared():
    return write_prepared
