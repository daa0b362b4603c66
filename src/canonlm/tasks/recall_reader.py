"""How a sample of `recall` is read back from its tokens: its bindings, and the question about each key."""

import re

from canonlm.tasks.bindings import ASK, BOS
from canonlm.tasks.recall_settings import RecallSpec
from canonlm.tasks.records import Malformed, Query, Slice, Vocab


class Reader:
    def __init__(self, spec: RecallSpec, vocab: Vocab) -> None:
        self.spec, self.vocab, self.some_again = spec, vocab, spec.some_again
        of_key, of_value = "kq" if spec.grid else f"k{{1,{spec.key_length}}}", f"v{{1,{spec.value_length}}}"
        self.slot = re.compile(f"(?P<key>{of_key})({'[kv]' if spec.levels > 1 else of_value})|nn")
        self.filler = "[kv]" if spec.filler == "words" else "n"
        self.question = re.compile(f"(?P<key>{of_key})({self.filler if spec.hidden else of_value})")

    def read(self, tokens: list[int]) -> tuple[dict, tuple[Query, ...]]:
        spec, text = self.spec, self.vocab.text
        kinds = "".join(self.vocab.name(token)[0] for token in tokens)
        at, noise, pairs = self.vocab.after(tokens, 0, BOS), 0, list[tuple[tuple[int, ...], tuple[int, ...]]]()
        while kinds[at : at + 1] not in ("a", ""):
            if (match := self.slot.match(kinds, at)) is None:
                raise self.vocab.unlike(tokens, at, "a binding, noise or ask")
            if match["key"]:
                pairs.append((tuple(tokens[at : match.end("key")]), tuple(tokens[match.end("key") : match.end()])))
            noise += not match["key"]
            at = match.end()
        at = self.vocab.after(tokens, at, ASK)
        values = dict[tuple[int, ...], list[tuple[int, ...]]]()
        for key, value in pairs:
            values.setdefault(key, []).append(value)
        bound = {key: every[-1] for key, every in values.items()}
        n = len(bound) // spec.levels
        if not n or len({value for _, value in pairs}) < len(pairs):
            raise Malformed(at - 1, "expected bindings before it, to different values")
        for what, counted_, right in (
            ("keys", len(bound), n * spec.levels),
            ("bindings", len(pairs), n * spec.levels + spec.rebound(n)),
            ("slots of noise", noise, spec.noise_slots(n)),
        ):
            if counted_ != right:
                raise Malformed(at - 1, f"expected {right} {what} before it, got {counted_}")
        queries, answers, why = list[Query](), list[tuple[int, ...]](), list[str]()
        for _ in range(n * spec.space):
            match = self.question.match(kinds, at)
            key = tuple(tokens[at : match.end("key")]) if match else ()
            if match is None or key not in bound:
                if re.match(self.filler * 2, kinds[at : at + 2]) is None:
                    what = "a question about one of the keys" + " or filler" * (spec.space > 1)
                    raise self.vocab.unlike(tokens, at, what)
                at += 2
                continue
            chain = [key]
            while chain[-1] in bound:
                if len(chain) > spec.levels:
                    raise Malformed(at, f"expected a key that leads to a value by {spec.levels} bindings or fewer")
                chain.append(bound[chain[-1]])
            start, at, value = match.end("key"), match.end(), chain[-1]
            if not spec.hidden and tuple(tokens[start:at]) != value:
                raise Malformed(start, f"expected {text(value)}, got {text(tokens[start:at])}")
            before = values[key][:-1]
            where: Slice = {"pairs": n}
            where |= {"hops": len(chain) - 1} if spec.levels > 1 else {}
            where |= {"bound": "again" if before else "once"} if self.some_again else {}
            queries.append(Query(start, at, where, start - len(key)))
            answers.append(value)
            why.append(
                " was bound to ".join(map(text, chain)) + "".join(f", and before to {text(old)}" for old in before)
            )
        if at < len(tokens) or len({*answers}) < n:
            raise Malformed(at, f"expected {n} questions, one about every key, and nothing after them")
        facts = {"n": n, "bindings": {text(key): text(value) for key, value in bound.items()}}
        return {**facts, "answers": answers, "why": why}, tuple(queries)
