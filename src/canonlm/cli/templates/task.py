"""Is the number of ones odd?  bos 0 1 1 0 1 ans odd"""

from canonlm.tasks import Answer, task


@task(
    vocab=["bos", "0", "1", "ans", "even", "odd"],  # the names of all tokens
    max_len=lambda settings: settings.bits + 3,  # tokens of the longest instance
    chance=0.5,  # the score of guessing
)
def parity(rng, test, *, bits: int = 16):  # a setting is a keyword argument: task.bits=40
    """The model reads zeros and ones and must say whether the number of ones is even or odd."""
    n = rng.choice([4, 8, bits]) if test else rng.randint(1, bits)  # all randomness comes from rng
    row = rng.choices("01", k=n)
    answer = "odd" if row.count("1") % 2 else "even"
    return ["bos", *row, "ans", Answer(answer, bits=n)]  # what is graded, and where its score counts
