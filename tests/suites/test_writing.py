"""Generation in batches equals a plain loop with a full forward pass for every token."""

import random
import re
from string import ascii_lowercase

import pytest
import torch
from tiny_models import greedily
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from canonlm import CanonLMConfig, CanonLMForCausalLM, tasks
from canonlm.data.tokenizers import load
from canonlm.models.hf import library_model, outside_model
from canonlm.models.interface import Sizes
from canonlm.suites import generation
from canonlm.suites.generation import Writer, end_tokens
from canonlm.suites.load_model import as_in_training
from canonlm.suites.sampling import Sampling
from canonlm.suites.task_words import TaskWords

LETTERS = [*ascii_lowercase, " ", ".", "\n"]
EOS, BOS = len(LETTERS), len(LETTERS) + 1
SIZES = {"vocab_size": BOS + 1, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OURS = {
    "llama": {},
    "llama+canon": {"canon_set": "ABCD"},
    "gla5+canon": {"mixers": ["gla"], "canon_set": "AbCD"},
    "gdn2+canon": {"mixers": ["gdn"], "canon_set": "AbCD"},
    "mamba2+canon": {"mixers": ["mamba2"], "canon_set": "AbCD", "mamba_state_size": 16},
    "retention": {"mixers": ["retention"], "canon_set": "b"},
    "hybrid": {"mixers": ["gdn", "attention"], "canon_sets": ["AbCD", "ABCD"]},
}
THEIRS = {
    "transformers Llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48)),
    "transformers GPT2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=BOS + 1, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    ),
}
FAMILIES = [*OURS, *THEIRS]
MOST = 10


def lively(model):
    """Weights large enough that every choice is clear, in double precision."""
    model = model.double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if "norm" in name or "ln_" in name:
                parameter.copy_((0 if "bias" in name else 1) + 0.2 * noise)
            elif parameter.ndim == 2:
                parameter.copy_(
                    noise * (1.0 if any(x in name for x in ("embed", "wte", "wpe")) else parameter.shape[-1] ** -0.5)
                )
    return model


def build(name):
    return lively(THEIRS[name]() if name in THEIRS else CanonLMForCausalLM(CanonLMConfig(**SIZES, **OURS[name])))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return build(request.param)


@pytest.fixture(scope="module")
def plain():
    return build("llama+canon")


@pytest.fixture(scope="module")
def letters():
    """A tokenizer with one token per letter."""
    inner = Tokenizer(models.WordLevel({**{x: i for i, x in enumerate(LETTERS)}, "<eos>": EOS, "<bos>": BOS}))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", bos_token="<bos>")


def prompts(count=9, longest=30):
    draw = random.Random("prompts")
    lengths = [1, 2, longest, *(draw.randint(1, longest) for _ in range(count - 3))]
    return ["".join(draw.choices(LETTERS, k=length)) for length in lengths]


def ids_of(text):
    return [LETTERS.index(letter) for letter in text]


def loop(model, ids, most=MOST):
    return greedily(model, ids, most, EOS)


def as_text(tokens):
    return "".join(LETTERS[token] for token in tokens if token < len(LETTERS))


@pytest.mark.every(4)
def test_batches_generate_the_same_text_as_a_loop(model, letters):
    texts = prompts()
    expected = [as_text(loop(model, ids_of(prompt))) for prompt in texts]
    assert len({len(prompt) for prompt in texts}) > 5
    assert len(set(expected)) > 4
    for batch_size in (None, 5, 1):
        written = dict(Writer(model, letters, batch_size=batch_size).write(texts, MOST))
        assert [written[index] for index in range(len(texts))] == expected


@pytest.mark.every(4)
def test_rows_that_end_early_do_not_affect_others(model, letters):
    """Rows stop at different places: at a stop string, which spans tokens, or at the end token."""
    requested = prompts(8)
    texts = [as_text(loop(model, ids_of(prompt))) for prompt in requested]
    stop = [texts[index][index + 1 : index + 3] for index in (0, 3, 6)] + [""]  # an empty one means nothing
    stop = list(dict.fromkeys(stop))
    expected = [text[: min((text.find(x) for x in stop if x and x in text), default=len(text))] for text in texts]
    assert len({len(text) for text in expected}) > 1
    written = dict(Writer(model, letters, batch_size=8).write(requested, MOST, stop))
    assert [written[index] for index in range(len(requested))] == expected


class Gru(nn.Module):
    """A module of a user, without a mask and without a cache."""

    def __init__(self, vocab_size, hidden_size):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, hidden_size), nn.Linear(hidden_size, vocab_size)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)

    def forward(self, ids):
        return self.head(self.gru(self.embed(ids))[0])


@pytest.mark.parametrize("sampling", [None, Sampling(seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["hf:recurrent_gemma", "own.py:Gru"])
def test_models_that_read_their_padding(name, sampling, letters):
    """Batches write what is written one by one, and name the prompts with a z, at which the logits become NaN."""
    sizes = Sizes(2, 32, 4, BOS + 1, 64)
    host = library_model(name, sizes) if name.startswith("hf:") else outside_model(name, Gru, sizes)
    model, requested = lively(host.module), [prompt.replace("z", "y") for prompt in prompts()]
    assert len({len(prompt) for prompt in requested}) < len(requested), "two of one length, in one row each"
    texts = dict(Writer(model, letters, batch_size=1, sampling=sampling).write(requested, MOST))
    if sampling is None:
        assert texts == {i: as_text(loop(model, ids_of(prompt))) for i, prompt in enumerate(requested)}
    stop = [texts[index][3:5] for index in (0, 4)]
    if name != "hf:recurrent_gemma":  # its state lives in the module, where the next prompt of that shape finds the NaN
        with torch.no_grad():
            model.get_input_embeddings().weight[LETTERS.index("z")] = torch.nan
        requested[2] += "z"
    results = []
    for batch_size in (1, 8, None):
        writer = Writer(model, letters, batch_size=batch_size, sampling=sampling)
        results.append((dict(writer.write(requested, MOST, stop)), {*writer.not_finite}))
    assert results[1:] == results[:1] * 2
    assert (2 in results[0][1]) == (name != "hf:recurrent_gemma")
    assert results[0][1] < {*range(len(requested))}


def test_the_end_token(letters):
    """The model writes another letter's weights on the end token, so that it ends sooner."""
    model, texts = build("llama+canon"), prompts()
    often = loop(model, ids_of("abc"), 8)[4]
    with torch.no_grad():
        model.lm_head.weight[[EOS, often]] = model.lm_head.weight[[often, EOS]]
    expected = [as_text(loop(model, ids_of(prompt))) for prompt in texts]
    lengths = {len(loop(model, ids_of(prompt))) for prompt in texts}
    assert min(lengths) < MOST == max(lengths), "some must end and others not"
    written = dict(Writer(model, letters).write(texts, MOST))
    assert [written[index] for index in range(len(texts))] == expected


def test_bos(plain, letters):
    texts = prompts(5)
    for bos, begin in ((False, []), (True, [BOS])):
        written = dict(Writer(plain, letters, bos=bos).write(texts, MOST))
        assert [written[i] for i in range(5)] == [as_text(loop(plain, begin + ids_of(prompt))) for prompt in texts]
        assert Writer(plain, letters, bos=bos).tokens("two words") == 9  # without special tokens
    assert dict(Writer(plain, letters).write([""], MOST)) == {0: as_text(loop(plain, [BOS]))}


def test_a_prompt_that_does_not_fit(letters):
    for name, fits in (("llama", False), ("hybrid", False), ("gla5+canon", True)):
        changes = {"max_position_embeddings": 30, **OURS[name]}
        writer = Writer(lively(CanonLMForCausalLM(CanonLMConfig(**SIZES, **changes))), letters, bos=True)
        texts = ["a" * 17, "b" * 18]  # with bos and 12 to write: 30 and 31
        assert writer.check(texts[:1], 12)
        if fits:
            assert len(dict(writer.write(texts, 12))) == 2
            continue
        with pytest.raises(ValueError, match=r"prompt 1: 19 tokens, and 12 to write, .* model's context of 30"):
            writer.write(texts, 12)
        beyond = Writer(writer._model.module, letters, beyond=True)
        assert len(dict(beyond.write(["a" * 40], 2))) == 1
    with pytest.raises(ValueError, match="context of 128"):  # its positions are a table
        Writer(build("transformers GPT2"), letters, beyond=True).write(["a" * 128], 1)


@pytest.mark.parametrize("name", ["llama+canon", "transformers Llama"])
def test_generation_settings_of_the_model_are_ignored(name, letters):
    """A repetition penalty of the model would change what is greedy; a wrong end token would cut the text."""
    model = build(name)
    expected = dict(Writer(model, letters).write(prompts(6), MOST))
    frequent = max(range(len(LETTERS)), key=lambda token: "".join(expected.values()).count(LETTERS[token]))
    model.generation_config.repetition_penalty = 50.0
    model.generation_config.num_beams = 3
    model.generation_config.eos_token_id = frequent  # of another tokenizer: here it is a plain letter
    settings = model.generation_config
    assert dict(Writer(model, letters).write(prompts(6), MOST)) == expected
    assert model.generation_config is settings
    assert end_tokens(model, letters) == [EOS]
    model.generation_config.eos_token_id = [frequent, BOS]
    assert end_tokens(model, letters) == [EOS, BOS]


def test_the_model_of_the_caller_is_not_changed(letters):
    model = build("transformers Llama").train()
    model.model.layers[0].eval()
    model.get_input_embeddings().padding_idx = 3
    settings, before = model.generation_config.to_dict(), {id(part): dict(vars(part)) for part in model.modules()}
    writer = Writer(model, letters)
    assert len(dict(writer.write(prompts(3), 2))) == 3
    assert {id(part): vars(part) for part in model.modules()} == before
    assert model.generation_config.to_dict() == settings
    embedded = model.get_input_embeddings()(torch.tensor([[1, 2, 3]]))
    assert model.generate(inputs_embeds=embedded, max_new_tokens=2).shape == (1, 2)  # a call that only it knows


def writes(text, prompt="?"):
    """The distribution of a byte model that writes `text` and then the end token after the prompt."""
    data = [*text.encode(), 257]

    def probabilities(tokens):
        scores = torch.zeros(len(tokens), 258)
        for i in range(len(tokens)):
            place = i - (len(prompt.encode()) - 1)
            scores[i, data[min(max(place, 0), len(data) - 1)]] = 9.0
        return scores

    return probabilities


@pytest.fixture
def bytes_tokenizer():
    return as_in_training(*load("bytes"))


SAID = "naïve café — fin\nand more"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ([], SAID),
        (["\n"], "naïve café — fin"),
        (["é"], "naïve caf"),  # two tokens, one letter
        (["more", "café —", "fin"], "naïve "),  # the first in the text counts
        (["nothing of that"], SAID),
        (["naïve"], ""),
    ],
    ids=["none", "line", "letter", "first", "absent", "at once"],
)
def test_stop_strings(knows, bytes_tokenizer, stop, expected):
    model = knows(258, writes(SAID))
    writer = Writer(model, bytes_tokenizer)
    assert dict(writer.write(["?"], 60, stop)) == {0: expected}
    pieces = []
    writer.stream("?", 60, pieces.append, stop)
    assert "".join(pieces) == expected
    assert not any("\ufffd" in piece for piece in pieces)  # a letter is shown once it is complete
    if expected == SAID:
        assert len(pieces) > 10


def test_a_stop_string_saves_steps(knows, bytes_tokenizer, monkeypatch):
    model, calls = knows(258, writes(SAID)), []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))
    dict(Writer(model, bytes_tokenizer).write(["?", "?", "?"], 60, [" "]))
    assert len(calls) == len("naïve ".encode())


def test_a_special_token_as_stop_string(knows, bytes_tokenizer):
    """Tokens that are left out of the text still end it if they are stop strings."""

    def probabilities(tokens):
        scores = torch.zeros(len(tokens), 258)
        scores[range(len(tokens)), [ord("x") if len(tokens) % 4 else 256] * len(tokens)] = 9.0
        return scores

    writer = Writer(knows(258, probabilities), bytes_tokenizer)
    assert dict(writer.write(["?"], 9)) == {0: "xxxxxxx"}
    assert dict(writer.write(["?"], 9, ["<bos>"])) == {0: "xxx"}


def test_incomplete_characters_are_shown_as_replacements(knows, bytes_tokenizer):
    writer, pieces = Writer(knows(258, writes("né")), bytes_tokenizer), []
    assert dict(writer.write(["?"], 2)) == {0: "n\ufffd"}
    writer.stream("?", 2, pieces.append)
    assert pieces == ["n", "\ufffd"]


def test_a_space_that_begins_the_text_is_kept(plain):
    """Sentencepiece tokenizers drop it when they decode a part alone."""
    inner = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2}))
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert tokenizer.decode([1, 2]) == "bc"
    writer = Writer(plain, tokenizer)
    assert writer.text([0, 0], [1, 2], []) == " bc"
    assert writer.text([0, 0], [2, 1], []) == "c b"


def limited(monkeypatch, most):
    """Limit memory to `most` tokens; returns the sizes of the batches that were tried."""
    tried, real = [], generation.generate

    def generate(model, prompts, new, *args, **options):
        tried.append(len(prompts))
        if len(prompts) * (max(map(len, prompts)) + new) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(model, prompts, new, *args, **options)

    monkeypatch.setattr(generation, "generate", generate)
    return tried


@pytest.mark.slow
def test_batches_shrink_until_they_fit(plain, letters, monkeypatch):
    texts = prompts(40, 30)
    expected = dict(Writer(plain, letters, batch_size=1).write(texts, 6))
    monkeypatch.setattr(generation, "CPU_TOKENS", 1000)
    answers = Writer(plain, letters).write(texts, 6)
    result = [next(answers)]  # of the longest 16, before memory is short
    tried = limited(monkeypatch, 150)
    result += answers
    assert len(result) == 40  # each once
    assert dict(result) == expected
    assert tried[:4] == [24, 8, 4, 4]  # the other 24; later ones start at a size that fitted
    assert tried.count(24) == 1
    assert max(tried[3:]) > 4  # shorter ones in larger batches
    lengths = [len(texts[index]) for index, _ in result]
    assert lengths == sorted(lengths, reverse=True)


def test_a_prompt_that_does_not_fit_into_memory(plain, letters, monkeypatch):
    limited(monkeypatch, 20)
    with pytest.raises(ValueError, match="prompt 1: its 36 tokens do not fit into memory"):
        list(Writer(plain, letters).write(["a", "b" * 30], 6))
    with pytest.raises(
        ValueError, match=r"--batch-size: expected fewer than 2: .*36 tokens do not fit into memory, got 8"
    ):
        list(Writer(plain, letters, batch_size=8).write(["a", "b" * 30], 6))
    with pytest.raises(ValueError, match=r"^36 tokens do not fit into memory"):
        Writer(plain, letters).stream("b" * 30, 6, print)


def test_other_errors_are_not_treated_as_out_of_memory(plain, letters, monkeypatch):
    def generate(*_, **__):
        raise RuntimeError("the sizes of tensors must match")

    monkeypatch.setattr(generation, "generate", generate)
    with pytest.raises(RuntimeError, match="must match"):
        list(Writer(plain, letters).write(["a", "b"], 6))


def test_sampling_is_the_same_in_any_batch(plain, letters):
    texts = prompts(9)
    written = {}
    for batch_size in (1, 4, None):
        torch.manual_seed(batch_size or 0)  # must not matter
        sampling = Sampling(0.9, top_k=20, seed=3)
        written[batch_size] = dict(Writer(plain, letters, batch_size=batch_size, sampling=sampling).write(texts, MOST))
    assert written[1] == written[4] == written[None]
    greedy = dict(Writer(plain, letters).write(texts, MOST))
    other = dict(Writer(plain, letters, sampling=Sampling(0.9, top_k=20, seed=4)).write(texts, MOST))
    assert written[1] != greedy
    assert written[1] != other
    same = dict(Writer(plain, letters, sampling=Sampling(0.9, seed=3)).write(["abc", "abc"], MOST))
    assert same[0] != same[1]  # prompts are sampled independently


def test_samples_follow_the_probabilities():
    """Chi-square against softmax, truncated by --top-k and --top-p."""
    logits, draws = torch.tensor([2.0, 1.5, 0.3, -0.4, -2.0]), 4000
    for settings, kept in (((1.0, None, None), 5), ((2.0, 3, None), 3), ((1.0, None, 0.8), 2)):
        distribution = torch.softmax(logits[:kept].double() / settings[0], 0)
        scores = Sampling(*settings, seed=1).processors(range(draws))(None, logits.expand(draws, -1))
        counts = torch.bincount(scores.argmax(-1), minlength=5)
        assert counts[kept:].sum() == 0
        chi_square = float(((counts[:kept] - draws * distribution) ** 2 / (draws * distribution)).sum())
        assert chi_square < 25, (settings, counts)  # of at most 4 degrees of freedom: p = 5e-5


def test_a_sampler_draws_again_for_every_token():
    processors = Sampling(seed=1).processors([0])
    logits = torch.zeros(1, 50)
    assert len({int(processors(None, logits).argmax()) for _ in range(20)}) > 10


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"temperature": 0.0}, "--temperature: expected a number >= 1e-30, got 0.0"),
        ({"temperature": float("nan")}, "--temperature: expected a number >= 1e-30, got nan"),
        ({"temperature": 1e-40}, "--temperature: expected a number >= 1e-30, got 1e-40"),
        ({"top_k": 0}, "--top-k: expected an integer >= 1, got 0"),
        ({"top_p": 1.5}, "--top-p: expected a number > 0 and <= 1, got 1.5"),
    ],
)
def test_settings_that_sample_nothing(settings, start):
    with pytest.raises(ValueError, match=rf"\A{re.escape(start)}\Z"):
        Sampling(**settings)


def test_a_model_without_a_tokenizer(plain, letters):
    with pytest.raises(ValueError, match="--tokenizer is missing: the model has none"):
        Writer(plain, None)
    with pytest.raises(ValueError, match="--bos needs a tokenizer with a BOS token"):
        Writer(plain, PreTrainedTokenizerFast(tokenizer_object=letters.backend_tokenizer), bos=True)


@pytest.mark.parametrize("name", ["copying", "mano", "capo"])
def test_the_vocabulary_of_a_task(name):
    """Samples are read in the form in which they are printed."""
    task = tasks.get(name)
    words = TaskWords(task)
    sample = task.sample("train", 0, 0)
    assert words(task.vocab.show(sample))["input_ids"] == sample.tokens.tolist()
    assert words.decode(sample.tokens.tolist()) == task.vocab.show(sample)
    assert task.vocab.name(words.eos_token_id) in ("end", "bos", "<bos>")


def test_an_unknown_word_of_a_task():
    words = TaskWords(tasks.get("copying", N=40))
    with pytest.raises(
        ValueError, match=r'unknown word "x41" of copying. Did you mean "x4"\? Words: bos, ans, x1, .*…'
    ):
        words("bos x1 x41")
