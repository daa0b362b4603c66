"""`canonlm.play` and `canonlm.train` as functions. (`canonlm.play` that trains: test_play.py.)"""

import pytest

import canonlm


def test_play_refuses_unknown_settings(tmp_path):
    with pytest.raises(ValueError, match=r'^unknown setting "task\.nn"'):
        canonlm.play("copying", out=tmp_path / "wrong", settings={"task.nn": 8})
    assert not (tmp_path / "wrong").exists()


def test_train_is_the_package_and_the_function(tiny, tmp_path):
    recipe, settings = tiny.yaml(tmp_path / "run.yaml"), {"train.steps": 2, "train.eval_every": 2}
    frame = canonlm.train(recipe, out=tmp_path / "run", settings=settings)
    assert frame.filter(frame["kind"] == "training")["step"].max() == 2
    assert canonlm.train.__name__ == "canonlm.train"
    with pytest.raises(ValueError, match=r'^unknown recipe "debugg"'):
        canonlm.train("debugg")
