"""Files that are complete or absent: what their errors say."""

import pytest

from canonlm.core import files


def write_below(folder):
    files.write_folder(folder, lambda inside: files.write_text(inside / "no" / "file", "x"))


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda path: files.write_text(path, "x"), "no/file"),
        (lambda path: files.write_text(path, "x"), "folder"),
        (lambda path: files.put_in_place(path.with_name("gone"), path), "gone"),
        (files.time_in, "no"),
        (write_below, "new"),
    ],
)
def test_an_error_names_no_temporary_file(write, name, tmp_path):
    """It may be all that a user sees, who has never heard of that file."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as caught:
        write(tmp_path / name)
    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / name), None)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_that_another_process_makes_meanwhile_is_kept(tmp_path):
    """The first of several exports into one folder keeps it."""

    def fill(inside):
        files.write_text(inside / "of", "second")
        files.write_folder(tmp_path / "out", lambda first: files.write_text(first / "of", "first"))

    with pytest.raises(FileExistsError):
        files.write_folder(tmp_path / "out", fill)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "of").read_text() == "first"
