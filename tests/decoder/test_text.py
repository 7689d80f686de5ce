"""Text in pieces: whole characters only, nothing lost, and stop strings wherever they fall."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from decoder.text import StopStrings, TextStream

EMOJI = "a👩‍👩‍👧é漢!"  # joined by zero-width joiners: 1 to 4 bytes a character
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


class ByteTokenizer:
    """Each id is a byte; 256 is a special token, "<end>"."""

    def decode(self, ids, skip_special_tokens):
        text = b"" if skip_special_tokens else b"<end>"
        return b"".join(bytes([i]) if i < 256 else text for i in ids).decode(errors="replace")


def stream(tokenizer, ids):
    """The pieces, the last one from `finish`."""
    text = TextStream(tokenizer)
    return [*(text.add(token) for token in ids), text.finish()]


@given(texts)
def test_pieces_are_whole_characters_and_add_up(text):
    pieces = stream(ByteTokenizer(), text.encode())
    assert "".join(pieces) == text
    assert pieces[-1] == "" or text.endswith("\ufffd")
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_character_comes_with_its_last_byte():
    ids = EMOJI.encode()
    pieces = stream(ByteTokenizer(), ids)
    shown = "".join
    for count in range(len(ids) + 1):
        assert shown(pieces[:count]) == ids[:count].decode("utf-8", errors="ignore")


@given(st.lists(st.integers(0, 256), max_size=30))
def test_any_bytes_add_up_to_the_whole_decoding(ids):
    tokenizer = ByteTokenizer()
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def cut_at_first_end(text, stops):
    """The text before whichever stop string is complete first: the slow way."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def cut(pieces, stops):
    """What `StopStrings` lets through, and whether it was hit."""
    watch = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += watch.add(piece)
        if watch.hit:
            return shown, True
    return shown + watch.finish(), False


@given(st.text("abc", max_size=20), st.lists(st.text("abc", max_size=4), max_size=3), st.data())
def test_stop_strings_do_not_depend_on_how_a_text_is_cut(text, stops, data):
    edges = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *edges, len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    assert cut(pieces, stops) == cut_at_first_end(text, stops)


@given(st.lists(st.sampled_from([*b"ab<", 256]), max_size=12), st.text("ab<end>", max_size=4))
def test_special_tokens_count_for_stop_strings_and_are_not_shown(ids, stop):
    """As in transformers, whose StopStringCriteria sees them too."""
    tokenizer = ByteTokenizer()
    text, watch = TextStream(tokenizer), StopStrings([stop])
    shown = "".join(
        watch.add(text.add(token), text.hidden(token)) for token in ids if not watch.hit
    )
    letters = [(one, token < 256) for token in ids for one in tokenizer.decode([token], False)]
    before, hit = cut_at_first_end("".join(letter for letter, _ in letters), [stop])
    assert watch.hit == hit
    wanted = "".join(letter for letter, visible in letters[: len(before)] if visible)
    assert shown + ("" if hit else watch.finish()) == wanted
