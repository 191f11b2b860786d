"""The text of a token in reports, from a task or from a tokenizer file."""

import json

import pytest

from megatron_support.config.recipe import HuggingFaceWeights, RandomWeights
from megatron_support.training.tasks import BOS, EOS, get_task
from megatron_support.training.token_text import token_text


def test_a_task_decodes_its_own_tokens():
    text_of = token_text(RandomWeights(), get_task("sort"))
    assert [text_of(token) for token in (ord("a"), ord("\n"), EOS)] == ["'a'", "'\\n'", "<eos>"]
    assert [text_of(token) for token in (0xE2, BOS)] == ["", ""], "a byte of a longer character, a special token"


@pytest.mark.parametrize(
    ("vocabulary", "texts"),
    [
        # byte-level BPE: G with a dot stands for a space, C with a dot for a newline, two characters for one of UTF-8
        ({"\u0120when": 0, "\u010a": 1, "\u00c3\u00a9": 2}, ["' when'", "'\\n'", "'\u00e9'"]),
        # SentencePiece, as a list of pieces with scores
        ([["\u2581when", -1.0], ["a", -2.0], ["\u2581", -3.0]], ["' when'", "'a'", "' '"]),
    ],
    ids=["byte-level", "sentencepiece"],
)
def test_a_tokenizer_beside_hugging_face_weights(vocabulary, texts, tmp_path):
    tree = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 3, "content": "<|end|>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    text_of = token_text(HuggingFaceWeights(type="huggingface", path=str(tmp_path)), None)
    assert [text_of(token) for token in range(5)] == [*texts, "'<|end|>'", ""]


def test_weights_without_a_tokenizer_have_no_text(tmp_path):
    assert token_text(RandomWeights(), None)(1) == ""
    assert token_text(HuggingFaceWeights(type="huggingface", path=str(tmp_path)), None)(1) == ""
