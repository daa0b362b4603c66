"""A model of ours in the lm-evaluation-harness scores and generates as the harness's own class does with a Llama of
transformers, and that class computes what the definition says."""

import math
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from tiny_models import CONTEXT, SENTENCES, greedily, make_decoder, make_tokenizer

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from transformers import GPT2Config, GPT2LMHeadModel

from canonlm.models.build import wrap
from canonlm.models.hf import library_model
from canonlm.models.interface import Sizes
from canonlm.suites.harness.lm import CanonLM
from canonlm.suites.load_model import Subject, open_model

LONG = " ".join(SENTENCES)
LETTERS = (" A", " B", " C")
PAIRS = [
    ("", "The ferry leaves"),
    ("", " A"),  # one token after nothing
    ("Question: which lamp?\nAnswer:", " the left one."),
    ("Question: which lamp?\nAnswer:", " A"),  # one token each: read off one forward pass
    ("Question: which lamp?\nAnswer:", " B"),
    ("Question: which lamp?\nAnswer:", " C"),
    ("The gulls follow ", "it"),  # the blank belongs to the answer
    ("He counted\n\n", "the letters"),
    (LONG, " and rested."),  # longer than the model
    (LONG, " A"),
    (SENTENCES[0], " " + SENTENCES[3]),
    ("Snøfall — 雪", " ünd Eis"),
    ("<s>He counted", " the letters"),  # begins with its own BOS token
]
TEXTS = ["", "Snow.", SENTENCES[1], LONG, LONG + "\n" + LONG]
PROMPTS = [
    ("The ferry", {"until": ["."], "max_gen_toks": 9}),
    ("Question: which of the two lamps is brighter?\nAnswer:", {"until": ["\n", "e"], "max_gen_toks": 12}),
    ("A", {"until": [], "max_gen_toks": 9}),
    (LONG, {"until": ["."], "max_gen_toks": 9}),  # longer than the model
    ("Snow fell on", {"until": ["."], "max_gen_toks": 9}),
]


def scores(lm):
    return lm.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)], True)


def rolling(lm, texts=TEXTS):
    return lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts], True)


def written(lm):
    return lm.generate_until([Instance("generate_until", {}, prompt, i) for i, prompt in enumerate(PROMPTS)], True)


def subject(arch, dtype=torch.float32, **about):
    return Subject(make_decoder(arch, dtype), make_tokenizer(), {"source": arch, **about})


@pytest.fixture(scope="module")
def reference(llama):
    """The results of the harness's own class, a request at a time, with and without a BOS token."""

    def results_with(bos):
        lm = HFLM(llama, device="cpu", dtype="float32", add_bos_token=bos, batch_size=1)
        return {"scores": scores(lm), "rolling": rolling(lm), "written": written(lm)}

    return {bos: results_with(bos) for bos in (False, True)}


@pytest.fixture(params=["transformers", "canonlm"])
def opened(request, llama, tmp_path):
    """One Llama, as transformers' class and as our decoder."""
    if request.param == "canonlm":
        make_decoder("llama").save_pretrained(tmp_path)
        make_tokenizer().save_pretrained(tmp_path)
    result = open_model(llama if request.param == "transformers" else str(tmp_path), device="cpu")
    assert result.about["kind"] == request.param
    return result


@pytest.mark.parametrize(
    ("opened", "bos", "batch_size"),  # every two values together
    [
        *(("transformers", False, 1), ("transformers", True, 7), ("transformers", False, "auto")),
        *(("canonlm", True, 1), ("canonlm", False, 7), ("canonlm", True, "auto")),
    ],
    indirect=["opened"],
)
def test_scores_and_generates_like_the_harness_with_a_transformers_llama(opened, reference, bos, batch_size):
    lm = CanonLM(opened, bos=bos, batch_size=batch_size)
    assert lm.max_length == CONTEXT
    for pair, (mine, greedy), (theirs, theirs_greedy) in zip(PAIRS, scores(lm), reference[bos]["scores"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4), pair
        assert greedy == theirs_greedy, pair
    # In a text for perplexity, their BOS token occurs twice and is scored: see the test of texts below.
    assert rolling(lm) == pytest.approx(reference[False]["rolling"], abs=1e-4)
    assert written(lm) == reference[bos]["written"]


def test_requests_distinguish_settings(reference):
    """Otherwise the comparison above would show less."""
    without, with_bos = ([score for score, _ in reference[bos]["scores"]] for bos in (False, True))
    cut = [pair for pair in PAIRS if len(make_tokenizer().encode("".join(pair))) > CONTEXT + 1]
    assert len(cut) == 3
    differ = [abs(a - b) > 1e-2 for a, b in zip(without, with_bos, strict=True)]
    assert differ == [pair not in cut and pair[0] != "" and "<s>" not in pair[0] for pair in PAIRS]
    assert reference[False]["written"] != reference[True]["written"]
    assert len(set(reference[True]["written"])) == len(PROMPTS)


def by_hand(model, ids, first):
    """The log-likelihood of ids[first:] given all tokens before, in float64."""
    with torch.no_grad():
        log_probs = model.double()(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(log_probs[place - 1, ids[place]].item() for place in range(first, len(ids)))


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("arch", ["llama", "gdn2+canon"])
def test_every_token_of_an_answer_counts(arch, bos):
    lm, model, tokenizer = CanonLM(subject(arch), bos=bos), make_decoder(arch), make_tokenizer()
    for (context, answer), (score, _) in zip(PAIRS, scores(lm), strict=True):
        blanks = len(context) - len(context.rstrip())
        read = context[: len(context) - blanks]
        ids = tokenizer.encode(context + answer, add_special_tokens=False)
        scored = len(ids) - len(tokenizer.encode(read, add_special_tokens=False))
        assert scored == 1 if answer in LETTERS else scored > 1
        if not context or (bos and ids[0] != 0):
            ids = [0, *ids]
        ids = ids[-(CONTEXT + 1) :]  # the last token is only predicted
        assert score == pytest.approx(by_hand(model, ids, len(ids) - scored), abs=1e-4), (context, answer)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(("text", "windows"), [(SENTENCES[1], 1), (LONG + "\n" + LONG, 7)], ids=["short", "long"])
def test_a_text_is_scored_after_one_bos_in_windows_that_share_one_token(text, windows, bos):
    model, ids = make_decoder("llama"), make_tokenizer().encode(text)
    assert ids[0] == 0
    total, ends = 0.0, [*range(1, len(ids), CONTEXT), len(ids)]
    assert len(ends) - 1 == windows
    for start, end in pairwise(ends):
        begin = max(0, end - 1 - CONTEXT)  # the last window reads as much as others, and scores the rest
        total += by_hand(model, ids[begin:end], start - begin)
    [score] = rolling(CanonLM(subject("llama"), bos=bos, batch_size=7), [text])
    assert score == pytest.approx(total, abs=1e-4 * windows)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gla5", "gdn2", "mamba2", "llama+canon", "mamba2+canon"])
def test_batches_change_nothing(arch):
    """Scored texts are padded on the right, continued ones on the left."""
    opened = subject(arch, torch.float64)
    one, seven = (CanonLM(opened, bos=True, batch_size=size) for size in (1, 7))
    for (alone, greedy), (together, greedy_together) in zip(scores(one), scores(seven), strict=True):
        assert alone == pytest.approx(together, abs=1e-5)
        assert greedy == greedy_together
    assert rolling(one) == pytest.approx(rolling(seven), abs=1e-4)
    texts = written(one)
    assert texts == written(seven)
    assert len(set(texts)) == len(PROMPTS)


@pytest.mark.parametrize("batch_size", [1, "auto"])
def test_answers_with_equal_ends_and_different_starts(llama, batch_size):
    """The harness's own class takes the scores of one from the positions of the other."""
    context, words = "The ferry leaves the", [" harbour", " before", " seven"]
    pairs = [(context + "".join(words[:cut]), "".join(words[cut:])) for cut in range(3)]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    ids = make_tokenizer().encode(context + "".join(words), add_special_tokens=False)
    lengths = [len(make_tokenizer().encode(answer, add_special_tokens=False)) for _, answer in pairs]
    assert len(set(lengths)) == 3
    right = [by_hand(make_decoder("llama"), ids, len(ids) - length) for length in lengths]
    mine = [score for score, _ in CanonLM(subject("llama"), batch_size=batch_size).loglikelihood(requests, True)]
    assert mine == pytest.approx(right, abs=1e-4)
    theirs = HFLM(llama, device="cpu", dtype="float32", add_bos_token=False, batch_size=batch_size)
    assert [score for score, _ in theirs.loglikelihood(requests, True)] != pytest.approx(right, abs=1e-1)


def test_what_an_answer_without_a_context_follows():
    """BOS, else EOS, else it is refused; a blank context counts as empty."""
    opened, model = subject("llama"), make_decoder("llama")
    prompts, expected = written(CanonLM(opened)), {}
    for bos, context, begin in (("<s>", " \n", 0), ("<s>", "", 0), (None, "", 1)):
        opened.tokenizer.bos_token = bos
        ids = [begin, *make_tokenizer().encode(f"{context} Snow fell", add_special_tokens=False)]
        request = Instance("loglikelihood", {}, (context, " Snow fell"), 0)
        [(expected[begin, context], _)] = CanonLM(opened).loglikelihood([request], True)
        assert expected[begin, context] == pytest.approx(by_hand(model, ids, 1), abs=1e-4)
    opened.tokenizer.eos_token = None
    assert written(CanonLM(opened)) == prompts
    with pytest.raises(ValueError, match="tokenizer: expected one with a BOS or an EOS token"):
        scores(CanonLM(opened))


def test_without_a_gpu_an_automatic_batch_is_bounded(monkeypatch):
    opened = subject("llama")
    lm = CanonLM(opened, batch_size="auto", max_length=2**12)
    requests = [(None, list(range(300)), [1] * 12)]
    assert lm._detect_batch_size() == 2
    assert lm._detect_batch_size(requests, 0) == 26
    assert CanonLM(opened, batch_size="auto", max_length=2**14)._detect_batch_size() == 1
    assert CanonLM(opened, batch_size="auto", max_batch_size=3)._detect_batch_size(requests, 0) == 3


def test_short_prompts_are_written_in_large_batches(monkeypatch):
    sizes = []
    detect = CanonLM._detect_batch_size
    monkeypatch.setattr(
        CanonLM, "_detect_batch_size", lambda self, *args: sizes.append(detect(self, *args)) or sizes[-1]
    )
    lm = CanonLM(subject("gdn2"), batch_size="auto", max_length=2**12)
    lm.generate_until([Instance("generate_until", {}, PROMPTS[0], 0)], True)
    assert sizes == [64]
    assert lm._detect_batch_size() == 2


def continuation(model, ids, most):
    return make_tokenizer().decode(greedily(model, ids, most, 1), skip_special_tokens=True)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("arch", "beyond", "whole", "bos", "batch_size"),  # every two values together
    [
        *(("llama", False, False, False, 1), ("llama", False, False, True, "auto")),
        *(("llama", True, True, False, "auto"), ("llama", True, True, True, 1)),
        *(("gdn2", False, True, False, 1), ("gdn2", False, True, True, "auto")),
        *(("gdn2+canon", True, True, False, "auto"), ("gdn2+canon", True, True, True, 1)),
    ],
)
def test_truncation_of_prompts_beyond_the_context(arch, beyond, whole, bos, batch_size):
    opened, max_new_tokens = subject(arch, torch.float64), 9
    assert (wrap(opened.model).context_length is None) == ("gdn2" in arch)
    lm = CanonLM(opened, bos=bos, beyond=beyond, batch_size=batch_size)
    prompts = [LONG, "Snow fell on", LONG + LONG]
    stop = {"until": [], "max_gen_toks": max_new_tokens}
    texts = lm.generate_until([Instance("generate_until", {}, (prompt, stop), i) for i, prompt in enumerate(prompts)])
    all_ids = [[0] * bos + make_tokenizer().encode(prompt, add_special_tokens=False) for prompt in prompts]
    cut = [continuation(opened.model, ids[-(CONTEXT - max_new_tokens) :], max_new_tokens) for ids in all_ids]
    uncut = [continuation(opened.model, ids, max_new_tokens) for ids in all_ids]
    assert [a == b for a, b in zip(cut, uncut, strict=True)] == [False, True, False]
    assert texts == (uncut if whole else cut)
    assert lm.cut == (0 if whole else 2)
    # Scored texts are still cut, as the answer would depend on the length of the windows.
    assert lm.max_length == CONTEXT
    assert scores(lm) == scores(CanonLM(opened, bos=bos, batch_size=batch_size))
    rolling(lm)
    assert lm.cut == (0 if whole else 2) + 3


def test_a_requested_length_truncates_the_input_of_a_recurrent_model():
    opened, prompt = subject("gdn2", torch.float64), (LONG, {"until": [], "max_gen_toks": 9})
    lm = CanonLM(opened, max_length=20)
    [text] = lm.generate_until([Instance("generate_until", {}, prompt, 0)], True)
    assert text == continuation(opened.model, make_tokenizer().encode(LONG)[-11:], 9)
    assert lm.cut == 1


def test_prompts_beyond_learned_positions_are_refused():
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=340, n_positions=CONTEXT, n_embd=8, n_layer=1, n_head=1, **ends))
    lm = CanonLM(Subject(model.eval(), make_tokenizer(), {}), beyond=True)
    requests = [Instance("generate_until", {}, prompt, i) for i, prompt in enumerate(PROMPTS)]
    lm.generate_until(requests[:1], True)
    with pytest.raises(ValueError, match="prompt: expected at most 36 tokens, as the model has learned no positions"):
        lm.generate_until(requests, True)
    assert lm.max_length == CONTEXT


def test_half_precision_is_scored_in_full():
    lm = CanonLM(subject("llama", torch.bfloat16))
    exact = [score for score, _ in scores(CanonLM(subject("llama", torch.float64)))]
    rough = [score for score, _ in scores(lm)]
    assert lm.softmax_dtype == torch.float32
    # A score rounded to bfloat16 has eight significant bits, so sums of such scores have trailing zeros.
    assert any(math.frexp(score)[0] * 2**16 % 1 for score in rough)
    assert rough == pytest.approx(exact, rel=0.1)


def test_decoding_is_greedy_whatever_the_models_own_settings_are(opened, reference):
    settings = {"repetition_penalty": 9.0, "num_beams": 3, "do_sample": True, "eos_token_id": 7}
    opened.model.generation_config.update(**settings)
    before = dict(vars(opened.model))
    lm = CanonLM(opened, batch_size=7)
    assert written(lm) == reference[False]["written"]
    assert vars(opened.model) == before
    assert opened.tokenizer.pad_token is None
    beams = [Instance("generate_until", {}, (prompt, {**how, "num_beams": 3}), 0) for prompt, how in PROMPTS[:2]]
    assert [lm.generate_until(beams[i : i + 1], True) for i in (0, 1)] == [[text] for text in lm.generate_until(beams)]
    assert (lm.questions, lm.not_finite) == (len(PROMPTS) + 4, 0)


def test_a_model_that_reads_its_padding():
    tokenizer = make_tokenizer()
    model = library_model("hf:rwkv", Sizes(2, 32, 4, len(tokenizer), 64)).module.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2 if parameter.ndim > 1 else 1)
        model.get_input_embeddings().weight[tokenizer.encode("A", add_special_tokens=False)] = torch.nan
    results = []
    for batch_size in (1, 3, 7, "auto"):
        lm = CanonLM(Subject(model, tokenizer, {"source": "host"}), batch_size=batch_size)
        results.append((written(lm), lm.not_finite))
    assert results[1:] == results[:1] * 3
    assert 0 < results[0][1] < len(PROMPTS)
    assert len({*results[0][0]}) > 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"bos": "yes"}, 'bos: expected true or false, got "yes"'),
        ({"beyond": 1}, "beyond: expected true or false, got 1"),
        ({"boss": True}, 'unknown model argument "boss". Did you mean "bos"?'),
        ({"bos": True}, "bos: expected false, as the tokenizer of llama has no BOS token"),
        (
            {"pretrained": Subject(SimpleNamespace(name_or_path=""), None, {})},
            "tokenizer is missing: the model has none",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, complaint):
    opened = subject("llama")
    opened.tokenizer.bos_token = None
    with pytest.raises(ValueError, match=f"^{re.escape(complaint)}"):
        CanonLM(**{"pretrained": opened, **arguments})


def test_a_context_that_is_too_short_is_reported():
    lm = CanonLM(subject("llama"), max_length=9)
    with pytest.raises(ValueError, match="max_length: expected more than the 12 tokens that the task lets"):
        written(lm)
    with pytest.raises(ValueError, match=r"max_length: expected at least [0-9]+, the tokens of the longest answer"):
        scores(lm)


def test_arguments_of_the_command_line_open_the_model(llama):
    arguments = f"pretrained={llama},bos=true,beyond=true,dtype=float32,max_length=32"
    lm = CanonLM.create_from_arg_string(arguments, {"batch_size": "auto", "max_batch_size": None, "device": "cpu"})
    assert (lm.bos, lm.max_length, lm.batch_size, lm.model.dtype) == (True, 32, "auto", torch.float32)
    assert lm.get_model_info()["canonlm"]["source"] == llama


def test_the_results_count_logits_that_are_not_finite(caplog):
    broken = subject("llama")
    with torch.no_grad():
        broken.model.lm_head.weight[:] = torch.nan
    lm = CanonLM(broken)
    scores(lm)
    written(lm)
    info = lm.get_model_info()
    assert info["questions"] == info["not_finite"] > 0
    assert f"are not finite (NaN) in {info['questions']} of {info['questions']} questions" in caplog.text


def test_the_harness_keeps_its_own_models():
    assert {"canonlm", "hf", "vllm", "dummy", "local-completions"} <= set(model_registry.keys())
