r"""Where reasoning may be cut.

Faults planted one at a time in a copy of the sources and seen caught here:
steps: start of the break for its end; blank lines without spaces only; indent of spaces and tabs only
(`\r\n`); first line or terminal break kept; number or bracket without white space behind; years as numbers;
"STEP" missed; alternatives leaking out of a pattern; gap from the last candidate for the last kept; > for ≥
in gap and tail; position 0 kept.
offsets: left for right search and back; good token drawn into broken bytes and broken run not drawn
together; no context; context cut inside a character; window never moved; window without context; broken
bytes never let go, let go anywhere, let go four tokens back unchecked, or counted twice; window moved
inside a character; text written twice; starts that decrease.
cuts: ≤ for <; logarithm compared with the threshold; count from the interval-th; mask ignored (cuts, τ); >
for ≥ τ; percentile misread; a cut at 0 or at the length.
vineppo: capital not asked for; environments or maths split; first for most central cut; only one cut;
operator in braces, in an environment or in "<="; < for ≤ 100; price or line end taken for maths; quadratic
search; white space as a step; wrong environment closed; nested spans shortened; "and" as part of a word;
comma in a number.
"""

import math
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from apportion import segments


class Pieces:
    """Fake tokenizer: one id a piece of text; decoding may strip one leading space, as SentencePiece does."""

    def __init__(self, *pieces: str, strip: bool = False) -> None:
        self.pieces, self.strip = pieces, strip
        self.decoded = 0  # tokens decoded so far: the cost

    def __call__(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        text = "".join(self.pieces[i] for i in ids)
        return text.removeprefix(" ") if self.strip else text


class Bytes:
    """Fake byte-level tokenizer: an id is a run of bytes that may hold parts of characters."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.decoded = 0

    def __call__(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def step_candidates(starts, text: str, min_gap: int = 16, tail: int = 8) -> list[int]:
    """ProbePO's candidates (Stage 2), as its plan puts the pieces together."""
    found = set(segments.char_to_token(starts, segments.step_starts(text)).tolist()) - {0}
    return segments.keep_tail(segments.merge_close(found, min_gap), len(starts), tail)


def offsets_of(*pieces: str) -> tuple[list[int], str]:
    return segments.token_offsets(Pieces(*pieces), range(len(pieces)))


def byte_fallback() -> tuple[Tokenizer, dict[str, int]]:
    """A real tokenizer of the Llama kind: ids 0–255 are bytes, the decoder strips the first space."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("▁", "x", "▁x", "▁y", "中", "</s>"):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer, vocab


def test_offsets_are_the_running_length_of_the_pieces():
    assert offsets_of("So", " it", " is", "", " 7.", "\n\n", "<eos>") == (
        [0, 2, 5, 8, 8, 11, 13],
        "So it is 7.\n\n<eos>",
    )


def test_no_tokens():
    assert segments.token_offsets(Pieces("a"), []) == ([], "")
    assert segments.token_offsets(Pieces("a"), [], context=[0]) == ([], "")


def test_leading_space_of_a_tail_is_kept_and_no_token_moves_to_the_query():
    decode = Pieces("x", " y", strip=True)
    starts, text = segments.token_offsets(decode, [1], context=[0])
    assert "x" + text == "x y" == decode([0, 1])
    assert starts == [0]
    assert segments.token_offsets(decode, [1]) == ([0], "y")  # no context: what decode says of the ids alone


def test_leading_spaces_survive_every_move_of_the_window():
    decode = Pieces(" y", strip=True)
    starts, text = segments.token_offsets(decode, [0] * 100)
    assert text == decode([0] * 100)
    assert starts == [0, *range(1, 199, 2)]


def test_tokens_that_share_a_character_start_with_it():
    # 中 = e4 b8 ad, 文 = e6 96 87, 😀 = f0 9f 98 80. The second token ends 中 and begins 文.
    decode = Bytes(b"\xe4", b"\xb8\xad\xe6\x96", b"\x87", b" \xf0\x9f", b"\x98", b"\x80", b"!")
    assert segments.token_offsets(decode, range(7)) == ([0, 0, 1, 2, 3, 3, 4], "中文 😀!")


def test_broken_bytes_do_not_take_the_following_token_along():
    decode = Bytes(b"a", b"\xf0", b"b", b"c", b"\xe4")
    assert segments.token_offsets(decode, range(5)) == ([0, 1, 2, 3, 4], "a\ufffdbc\ufffd")


def test_replacement_character_in_the_text_itself():
    assert offsets_of("a", "\ufffd", "b", "\ufffd") == ([0, 1, 2, 3], "a\ufffdb\ufffd")


def test_context_cut_in_the_middle_of_a_character():
    tokenizer, vocab = byte_fallback()
    prompt = [*"😀".encode() * 9, *"é".encode()]  # 38 bytes: the last 16 tokens begin inside a character
    starts, text = segments.token_offsets(tokenizer.decode, [*"é".encode(), vocab["▁y"]], context=prompt)
    assert (starts, text) == ([0, 0, 1], "é y")


def test_byte_fallback_tokenizer():
    tokenizer, vocab = byte_fallback()
    ids = [vocab["▁y"], *"😀".encode(), vocab["中"], vocab["▁"], vocab["x"], 0xF0, 0x9F, vocab["</s>"]]
    starts, text = segments.token_offsets(tokenizer.decode, ids, context=[vocab["x"]])
    assert text == " y😀中 x\ufffd\ufffd</s>"
    assert starts == [0, 2, 2, 2, 2, 3, 4, 5, 6, 6, 8]
    for run in (40, 60, 300):  # bad bytes beyond the window, then good text
        garbage = [0xFF] * run + ids
        assert segments.token_offsets(tokenizer.decode, garbage)[1] == tokenizer.decode(garbage)


@given(st.lists(st.sampled_from(["a", " b", "\n", "\n\n", "", "。", "👍🏽", " ", "<s>"]), max_size=80), st.data())
def test_text_pieces_make_up_the_decode(pieces, data):
    """Strings: start t is the length of the decoded prefix; with the leading space stripped too."""
    split = data.draw(st.integers(0, len(pieces)))
    for strip in (False, True):
        # A stripping decoder prints special tokens; tokens without text would hide where its text begins.
        decode = Pieces(*(piece for piece in pieces if piece or not strip), strip=strip)
        ids = list(range(len(decode.pieces)))
        starts, text = segments.token_offsets(decode, ids)
        assert text == decode(ids)
        assert starts == [len(decode(ids[:t])) for t in ids]  # slow reference: decode every prefix
        starts, text = segments.token_offsets(decode, ids[split:], context=ids[:split])
        assert decode(ids[:split]) + text == decode(ids)
        assert len(starts) == len(ids[split:])


@given(st.text(alphabet="aé中😀 \n", max_size=60), st.data())
def test_any_split_of_utf8_into_byte_tokens(text, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(raw) - 1, 1)), max_size=len(raw))))
    edges = [0, *(cut for cut in cuts if cut < len(raw)), len(raw)]
    decode = Bytes(*(raw[low:high] for low, high in pairwise(edges)))
    starts, found = segments.token_offsets(decode, range(len(edges) - 1))
    # Reference from the bytes: the character that holds the token's first byte.
    owner: dict[int, int] = {}
    for index, character in enumerate(text):
        for _ in character.encode():
            owner[len(owner)] = index
    assert found == text
    assert starts == [owner.get(low, 0) for low in edges[:-1]]


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=120))
@example([b"\xf0\x9f"] * 40 + [b"\x98\x80"] + [b"a"] * 40)
@example([b"\x80"] * 33 + [b"\xf0", b"\x9f", b"\x98", b"\x80", b"!"])
@example([b"\x80"] * 30 + [b"\xf0", b"\x9f", b"\x98", b"\x80"] * 3 + [b"\x80"] * 40)
def test_hostile_bytes(pieces):
    decode = Bytes(*pieces)
    ids = list(range(len(pieces)))
    starts, text = segments.token_offsets(decode, ids)
    assert text == decode(ids)
    assert starts == sorted(starts) and len(starts) == len(ids)
    assert all(0 <= start < max(len(text), 1) for start in starts)


@pytest.mark.parametrize("shift", range(4))
def test_let_go_of_broken_bytes_never_splits_a_character(shift):
    for good in ("é", "中", "😀"):
        pieces = [b"\xff"] * (29 + shift) + [bytes([byte]) for byte in good.encode()] * 12
        decode = Bytes(*pieces)
        assert segments.token_offsets(decode, range(len(pieces)))[1] == "\ufffd" * (29 + shift) + good * 12


@pytest.mark.parametrize("piece", [b" word", b"\xff", b"\xf0\x9f"])
def test_cost_is_linear(piece):
    cost = []
    for length in (500, 4000):
        decode = Bytes(piece)
        segments.token_offsets(decode, [0] * length)
        cost.append(decode.decoded / length)
    assert cost[1] < 1.1 * cost[0]
    assert cost[1] < 40


def test_boundary_inside_a_token_goes_to_the_next():
    # "ab", ".\n\nC", "d": the step starts at C (offset 5), inside the second token.
    starts, text = offsets_of("ab", ".\n\nC", "d")
    assert segments.step_starts(text) == [5]
    assert segments.char_to_token(starts, [5]).tolist() == [2]


def test_boundary_at_a_split_character_takes_its_first_token():
    starts = [0, 1, 3, 3, 3, 4]
    assert segments.char_to_token(torch.tensor(starts), torch.tensor([3, 0, 2, 4, 5])).tolist() == [
        2,
        0,
        2,
        5,
        6,
    ]


def test_a_step_may_hold_no_token():
    starts, text = offsets_of("a\n", "b\nc\n", "d\n", "<eos>")
    steps = segments.vineppo_steps(text[: starts[-1]])
    assert steps == [2, 4, 6]  # c's step has no token of its own


@given(st.lists(st.integers(0, 40), max_size=30), st.lists(st.integers(0, 45), max_size=10))
def test_searches_against_loops(starts, offsets):
    starts = sorted(starts)
    first = [next((t for t, start in enumerate(starts) if start >= offset), len(starts)) for offset in offsets]
    assert segments.char_to_token(starts, offsets).tolist() == first


def test_wrong_starts_are_named():
    with pytest.raises(ValueError, match=r"token_starts: 5 is followed by 0 at position 2"):
        segments.char_to_token([0, 5, 0], [1])
    with pytest.raises(ValueError, match=r"token_starts: got shape \(1, 2\)"):
        segments.char_to_token(torch.tensor([[0, 1]]), [1])


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("", []),
        ("\n\n", []),
        ("one", []),
        ("a\nb", []),  # a line end alone is no paragraph break
        ("a\n\nb", ["b"]),
        ("a\n\n\n\nb", ["b"]),
        ("a\n \t\nb", ["b"]),
        ("a\n\n  \n\n  b", ["  b"]),  # the step has its indent
        ("a\r\n\r\nb\r\n\r\n", ["b"]),
        ("\n\na\n\nb\n\n", ["b"]),  # white space alone is no step, before or after
        ("  1. a\n2. b", ["2. b"]),
        ("\n 1. a\n2. b", ["2. b"]),
        ("甲。\n\n乙。\n\n😀", ["乙", "😀"]),
        ("so\n3.14 is pi\n2. next", ["2. next"]),
        ("x\n2.5\n2.\nyes", ["2.\n"]),
        ("x\n1) a\n(2) b\n(3)(4) = 12\n5)6", ["1) a", "(2) b"]),
        ("x\n2024. No year\nStepping 3", []),
        ("x\nStep 1: a\n**Step 2:** b\nSTEP 10\nStep by step", ["Step 1", "**Step 2", "STEP 10"]),
        ("x\n- a\n* b\n• c\n-5\n**bold**\n---", ["- a", "* b", "• c"]),
        ("x\n  - a", ["  - a"]),
        ("a\n\nStep 2: b", ["Step 2"]),  # two reasons, one step
        ("x Step 2", []),
        ("$$\na\n\nb\n$$\n```\nc\n\nd\n```", ["b\n$$", "d\n```"]),
        ("a\n\n", []),
        ("a\n\n \n", []),
    ],
)
def test_step_starts(text, starts):
    found = segments.step_starts(text)
    assert len(found) == len(starts)
    for offset, start in zip(found, starts, strict=True):
        assert text[offset:].startswith(start)
        assert text[offset - 1] == "\n"


def test_patterns_are_a_setting():
    text = "a\n\nb\n1. c\n## d"
    assert segments.step_starts(text, ()) == [3]
    assert segments.step_starts(text, ["## "]) == [3, 10]
    assert segments.step_starts(text, ["## |c", r"1\."]) == [3, 5, 10]  # "c" stands at no line start
    with pytest.raises(ValueError, match=r"patterns: '\(' is no regular expression"):
        segments.step_starts(text, ["("])


@given(st.text(alphabet="a1. -*)(\n\r\tS", max_size=60))
def test_step_starts_by_lines(text):
    """Slow reference: walk the lines; a marker is a line's whole first word."""
    numbers = {form.replace("n", n) for form in ("n.", "n)", "(n)") for n in ("1", "11", "111")}
    expected, offset, blank, seen = [], 0, False, False
    for line in text.split("\n"):
        words = line.split()
        bullet = line.lstrip()[:2] in ("- ", "-\t", "* ", "*\t")
        if seen and words and (blank or bullet or words[0] in numbers):
            expected.append(offset)
        blank, seen = not words, seen or bool(words)
        offset += len(line) + 1
    assert segments.step_starts(text) == expected


def test_merge_keeps_the_earlier_and_measures_from_the_last_kept():
    # 5 → 15 is 10 < 16: dropped; 5 → 21 is 16: kept; 21 → 36 is 15: dropped; 21 → 40 is 19: kept.
    assert segments.merge_close([40, 5, 15, 21, 36], 16) == [5, 21, 40]
    assert segments.merge_close([3], 16) == [3]  # no gap to the response's start is asked for
    assert segments.merge_close([4, 4, 5], 1) == [4, 5]
    assert segments.merge_close([], 16) == []


def test_tail():
    assert segments.keep_tail([1, 12, 13, 20, 25], length=20, tail=8) == [1, 12]  # 20 − 12 = 8, 20 − 13 = 7
    assert segments.keep_tail([19, 20], length=20, tail=0) == [19]


def test_candidates_from_tokens():
    # Tokens 0–4 "w", 5 "\n", 6 "\n" (one break, two tokens), 7–11, 12 "\n\n", 13–29, 30 "\n\n", 31–36.
    pieces = ["w"] * 5 + ["\n", "\n"] + ["w"] * 5 + ["\n\n"] + ["w"] * 17 + ["\n\n"] + ["w"] * 6
    starts, text = offsets_of(*pieces)
    assert step_candidates(starts, text, min_gap=1, tail=1) == [7, 13, 31]
    assert step_candidates(starts, text, min_gap=16, tail=1) == [7, 31]
    assert step_candidates(starts, text) == [7]  # 37 − 31 = 6 < 8
    assert step_candidates(torch.tensor(starts), text, tail=6) == [7, 31]


def test_two_breaks_in_one_token_are_one_candidate_and_the_terminal_break_none():
    starts, text = offsets_of("a", "\n\nb\n\n", "c", "d", "\n\n")
    assert segments.step_starts(text) == [3, 6]
    assert step_candidates(starts, text, min_gap=1, tail=1) == [2]
    assert step_candidates([], "") == []


def test_position_zero_is_no_candidate_and_swallows_none():
    # Tokens that start at 3, 4, 5, …: the step at 3 lands on token 0, the one at 5 on token 2.
    text = "a\n\nb\n- c" + "d" * 30
    assert segments.step_starts(text) == [3, 5]
    assert step_candidates(range(3, 30), text, min_gap=16, tail=1) == [2]


def test_prefix_stays_ids():
    """Vocabulary a = 0, b = 1, ab = 2: ids [0, 1] are never turned into [2]; two tokens, two starts."""
    assert segments.token_offsets(Pieces("a", "b", "ab"), [0, 1]) == ([0, 1], "ab")


@given(
    st.lists(st.sampled_from(["a", " b", "\n", "\n\n", ".\n\n", "1.", " ", "- ", "中"]), max_size=80),
    st.integers(1, 20),
    st.integers(1, 10),
)
def test_candidate_laws(pieces, min_gap, tail):
    starts, text = offsets_of(*pieces)
    kept = step_candidates(starts, text, min_gap, tail)
    everything = step_candidates(starts, text, 1, 1)
    assert set(kept) <= set(everything)
    assert all(0 < position <= len(starts) - tail for position in kept)
    assert all(later - earlier >= min_gap for earlier, later in pairwise(kept))
    for position in everything:  # nothing is dropped without a reason
        near = any(0 <= position - earlier < min_gap for earlier in kept)
        assert near or position > len(starts) - tail


def test_spo_chain_numbers():
    p = torch.tensor([0.95, 0.5, 0.99, 0.8, 0.3, 0.97, 0.6])
    cuts = segments.low_probability_cuts(p.log(), threshold=0.9, interval=2)
    assert cuts == [1, 4]
    assert [cut - 1 for cut in cuts] == [0, 3]  # SPO's states
    # A of a segment = V(next cut) − V(cut), last r − V; no base before the first cut: 0; loss mask p < 0.9.
    values, reward = [0.6, 0.2], 1.0
    ends = [*cuts[1:], len(p)]
    advantage = torch.zeros(7)
    for low, high, here, after in zip(cuts, ends, values, [*values[1:], reward], strict=True):
        advantage[low:high] = after - here
    advantage *= p < 0.9
    assert torch.allclose(advantage, torch.tensor([0, -0.4, 0, -0.4, 0.8, 0, 0.8]))


def test_low_probability_edges():
    p = torch.tensor([0.1, 0.9, 0.2, 0.3])
    assert segments.low_probability_cuts(p.log(), interval=1) == [0, 2, 3]  # 0.9 itself is not below 0.9
    assert segments.low_probability_cuts(p.log()) == [0]
    assert segments.low_probability_cuts(p.log(), interval=1, mask_T=torch.tensor([0, 1, 1, 1])) == [2, 3]
    assert segments.low_probability_cuts(torch.zeros(4)) == []
    assert segments.low_probability_cuts(torch.full((2,), -math.inf), interval=1) == [0, 1]
    assert segments.low_probability_cuts(torch.empty(0)) == []
    for name, arguments in {"threshold": (1.5, 1), "interval": (0.9, 0)}.items():
        with pytest.raises(ValueError, match=f"{name}: got"):
            segments.low_probability_cuts(p.log(), *arguments)
    with pytest.raises(ValueError, match=r"old_logprob: got shape \(1, 4\)"):
        segments.low_probability_cuts(p.log()[None])
    with pytest.raises(ValueError, match=r"mask: got shape \(3,\), expected \(4,\)"):
        segments.low_probability_cuts(p.log(), mask_T=torch.ones(3))


def test_entropy_percentile():
    entropy = torch.tensor([0.0, 3.0, 1.0, 2.0, 4.0])
    # Order statistics 0…4 of five values: the 75th percentile is exactly 3, the 60th is 2.4.
    assert segments.entropy_cuts(entropy, 75) == [1, 4]
    assert segments.entropy_cuts(entropy, 60) == [1, 4]
    assert segments.entropy_cuts(entropy, 50) == [1, 3, 4]
    assert segments.entropy_cuts(entropy) == [4]
    assert segments.entropy_cuts(entropy, 0) == [0, 1, 2, 3, 4]
    # Without the masked 0 the median of 3, 1, 2, 4 is 2.5 (2 with it); a masked 4 is no cut (median 1.5).
    assert segments.entropy_cuts(entropy, 50, torch.tensor([0, 1, 1, 1, 1])) == [1, 4]
    assert segments.entropy_cuts(entropy, 50, torch.tensor([1, 1, 1, 1, 0])) == [1, 3]
    assert segments.entropy_cuts(entropy, 50, torch.zeros(5)) == []
    assert segments.entropy_cuts(torch.ones(3)) == [0, 1, 2]
    assert segments.entropy_cuts(entropy.bfloat16(), 75) == [1, 4]
    with pytest.raises(ValueError, match="percentile: got 101"):
        segments.entropy_cuts(entropy, 101)


def test_fixed_lengths():
    assert segments.fixed_length_cuts(10, 4) == [4, 8]
    assert segments.fixed_length_cuts(8, 4) == [4]
    assert segments.fixed_length_cuts(3, 4) == segments.fixed_length_cuts(0, 4) == []
    with pytest.raises(ValueError, match="size: got 0"):
        segments.fixed_length_cuts(5, 0)


def parts(text: str, max_chars: int = 100) -> list[str]:
    return [text[low:high] for low, high in pairwise([0, *segments.vineppo_steps(text, max_chars), len(text)])]


@pytest.mark.parametrize(
    "expected",
    [
        ["one line\n", "two\n\n  \n", "three\n"],
        ["\n\nHere is one.", " Here two!", " And (3?)", " Four is 4.5 and lower. case."],
        ['He said "so."', " We get $x = 5.$", " Done"],
        ["It costs $5.", " Then $6."],
        ["a\n", "\\begin{align}\nx &= 1. A\\\\\n\\begin{b}\n\\end{b}\ny\n\\end{align}\n", "b"],
        ["Thus\n", "\\[\nz = 1. So\n\\]\n", "$$\na\n$$\n", "b"],
        ["never closed: \\begin{a}\n", "\\begin{a}\nx\n\\end{a}\n", "y\n"],
        ["It is $5\n", "or $ more\n", "b"],
        ["甲。乙\n", "丙"],
    ],
)
def test_vineppo_lines_sentences_and_environments(expected):
    assert parts("".join(expected)) == expected


def test_vineppo_cuts_long_parts_most_centrally():
    assert parts("aaaa, bbbbbbbbb, cccccccc: dddd", 20) == ["aaaa, bbbbbbbbb,", " cccccccc: dddd"]
    assert parts("aaaaaaaaaaaa and bbbbbbbbbbbb", 20) == ["aaaaaaaaaaaa", " and bbbbbbbbbbbb"]
    assert parts("sandy 1,000 at 3:00, and", 10) == ["sandy 1,000 at 3:00,", " and"]
    assert parts("aaaa andy bbbb", 5) == ["aaaa andy bbbb"]
    # halves are cut again
    assert parts("aaaa, bbbb, cccc, dddd", 6) == ["aaaa,", " bbbb,", " cccc,", " dddd"]
    assert parts("aaaaaa, bbbbbb", 14) == ["aaaaaa, bbbbbb"]  # 14 characters are not more than 14
    assert parts("aaaaaa, bbbbbb", 13) == ["aaaaaa,", " bbbbbb"]
    assert parts("a" * 100 + ", b") == ["a" * 100 + ",", " b"]
    assert parts("a" * 97 + ", b") == ["a" * 97 + ", b"]


def test_vineppo_cuts_inside_maths():
    assert parts("so $a, b = c + d$ ends", 15) == [
        "so $a, b = c",
        " + d$ ends",
    ]  # comma at 6, cuts at 8, 12; centre 11
    assert parts(r"\(\frac{a=b}{c+d} \le x<=y = zz\)", 20) == [r"\(\frac{a=b}{c+d} \le x<=y", r" = zz\)"]
    assert parts("$=ab$ $$+c$$ $-d=e$", 4) == ["$=ab$ $$+c$$ $-d", "=e$"]  # no cut without a left side
    assert parts("\\begin{x}a, b = c and d: e\\end{x}", 5) == ["\\begin{x}a, b = c and d: e\\end{x}"]
    assert parts(r"$$\begin{x}a = b\end{x} = c$$", 5) == [r"$$\begin{x}a = b\end{x}", " = c$$"]
    assert parts("cost $5 and some $6 more", 12) == ["cost $5", " and some $6 more"]  # prices are no maths


@given(st.text(alphabet="ab A.,:\n$\\[](){}=+5!", max_size=150), st.integers(1, 30))
@example(r"\begin{a}\begin{b}\end{a}\end{b} A. B", 1)
def test_vineppo_laws(text, max_chars):
    steps = segments.vineppo_steps(text, max_chars)
    assert steps == sorted(set(steps))
    assert "".join(parts(text, max_chars)) == text
    if text.strip():
        assert all(part.strip() for part in parts(text, max_chars))
    assert set(segments.vineppo_steps(text, 10**9)) <= set(steps)  # long parts only add cuts


@pytest.mark.parametrize(
    "unit",
    ["\\[", "$", "$a$ ", "$\n", "\n ", "\n", ".", "\\begin{a}", "a, ", "1. ", "- ", "x)", " ", "$a+", " and"],
)
def test_hostile_text_is_linear(unit):
    """60,000 repetitions: quadratic work would take minutes."""
    begun = time.process_time()
    segments.vineppo_steps(unit * 60_000)
    segments.step_starts(unit * 60_000)
    assert time.process_time() - begun < 5
