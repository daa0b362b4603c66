"""One line for an evaluation, whatever the task."""

from canonlm.report.watch import in_words
from canonlm.runs.rows import evaluation


def scores(task, row):
    return in_words(task, evaluation(row, 0))


def entry(where, correct, total=10):
    return {"slice": where, "correct": correct, "total": total}


def test_few_slices_are_named_and_many_averaged():
    assert scores("depo", {"slices": [entry({"k": 1}, 9), entry({"k": 2}, 4)]}) == "1 hop 0.90  2 hops 0.40"
    many = [entry({"attribute": name}, right) for name, right in zip("abcde", (0, 2, 4, 6, 8), strict=True)]
    measures = {"bits_per_parameter": 0.12345, "bits_per_person": 12.0}
    assert scores("capo", {"slices": many, "measures": measures}) == "mean accuracy 0.40  bits per parameter 0.123"


def test_other_scales_are_left_to_the_report():
    row = {"slices": [entry({"n": 9}, 5), entry({"depth": 1}, 3, 4), entry({"nodes": "2-4"}, 0, 0)]}
    said = scores("brevo", row)
    assert said.endswith(" 0.50")
    assert "depth" not in said
