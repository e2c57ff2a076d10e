"""The tokenizer on a byte tokenizer built here: no model file is needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polyrhythm.errors import UserError
from polyrhythm.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}:{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<s>", "</s>"])
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 300, "max_position_embeddings": 64, "eos_token_id": 7}), encoding="utf-8"
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}), encoding="utf-8")
    return tmp_path


def test_text_is_encoded_with_the_special_tokens_and_decoded_without(model_dir: Path) -> None:
    tokenizer = Tokenizer(model_dir)
    ids = tokenizer.encode("12 + 3 , é\n")
    assert ids[0] == 256
    assert tokenizer.decode(ids) == "12 + 3 , é\n"


def test_messages_end_where_the_answer_begins_and_no_special_token_is_doubled(model_dir: Path) -> None:
    tokenizer = Tokenizer(model_dir)
    ids = tokenizer.encode([{"role": "user", "content": "hi"}])
    assert [ids.count(256), ids.count(257)] == [2, 1]
    assert tokenizer.decode(ids) == "user:hiassistant:"


def test_the_models_numbers_are_read_from_its_config(model_dir: Path) -> None:
    tokenizer = Tokenizer(model_dir)
    assert tokenizer.vocab_size == 300
    assert tokenizer.context_length == 64
    assert tokenizer.eos_token_ids == (9, 7, 257)


def test_messages_without_a_chat_template_are_the_users_mistake(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").unlink()
    tokenizer = Tokenizer(model_dir)
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.encode([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json"])
def test_a_folder_with_a_file_missing_is_named(model_dir: Path, missing: str) -> None:
    (model_dir / missing).unlink()
    with pytest.raises(UserError, match=f"{model_dir}.*{missing}"):
        Tokenizer(model_dir)


def test_a_broken_tokenizer_file_is_the_users_mistake(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="cannot be loaded"):
        Tokenizer(model_dir)


def test_the_tokenizer_works_without_importing_torch(model_dir: Path) -> None:
    program = (
        "import sys; from polyrhythm.tokenizer import Tokenizer; assert 'transformers' not in sys.modules;"
        "t = Tokenizer(sys.argv[1]); t.decode(t.encode('a')); t.encode([{'role': 'user', 'content': 'b'}]);"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", program, str(model_dir)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
