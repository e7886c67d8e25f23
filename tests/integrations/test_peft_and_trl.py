"""Trainings of PEFT and TRL, which go through the Trainer of transformers."""

import pytest
import torch

import compressm as cs
from compressm.compression import CompressionError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytest.importorskip("trl")
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MambaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from compressm.integrations.transformers_trainer import CompressionCallback
from tests.adapters.transformers_models import make, mixers
from tests.integrations.test_transformers_trainer import DATA, runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the packages themselves
]
LETTERS = "abcdefgh"
OPTIONS = {"when": [3, 6], "keep": cs.KeepFraction(0.5), "uniform": True, "calibrate": runs}


def adapted(*targets):
    return get_peft_model(make(), LoraConfig(r=2, target_modules=list(targets)))


def test_a_model_is_cut_beside_adapters_of_other_layers_and_loads_after_they_are_merged(tmp_path):
    model = adapted("embeddings")
    before = [mixer.ssm_state_size for mixer in mixers(model)]
    cuts = cs.compress_(model, keep=cs.KeepFraction(0.5), calibrate=lambda model: model(input_ids=DATA[:4]))
    assert [cut.rank for cut in cuts] == [order // 2 for order in before]
    merged = model.merge_and_unload().eval()
    merged.save_pretrained(tmp_path)
    loaded = MambaForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(DATA).logits, merged(DATA).logits)


@pytest.mark.parametrize("targets", [["in_proj"], ["x_proj", "in_proj"]])
def test_a_layer_with_an_adapter_is_refused_until_it_is_merged(targets):
    model = adapted(*targets)
    with pytest.raises(CompressionError, match="merge the adapters first"):
        cs.Compressor(model, when=[1], keep=cs.KeepFraction(0.5), calibrate=runs)
    assert len(cs.compress_(model.merge_and_unload(), keep=cs.KeepFraction(0.5), calibrate=runs)) == 2


def letters():
    known = {letter: place for place, letter in enumerate(["<pad>", "<eos>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def fine_tuned(folder, resume=None):
    callback = CompressionCallback(**OPTIONS)
    options = {"max_steps": 8, "save_steps": 2, "learning_rate": 1e-2, "max_length": 16, "bf16": False}
    arguments = SFTConfig(
        str(folder), **options, report_to=[], disable_tqdm=True, use_cpu=True, gradient_checkpointing=False
    )
    torch.manual_seed(0)
    texts = [{"text": LETTERS[k % 8 :] + LETTERS[: k % 8]} for k in range(40)]
    trainer = SFTTrainer(
        make(), args=arguments, train_dataset=Dataset.from_list(texts), processing_class=letters(), callbacks=[callback]
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model, callback.history


def test_a_fine_tuning_of_trl_is_cut_resumes_with_the_same_bits_and_loads(tmp_path):
    model, history = fine_tuned(tmp_path)
    assert [(cut.step, cut.rank) for cut in history] == [(3, 3), (3, 3), (6, 1), (6, 1)]
    loaded = MambaForCausalLM.from_pretrained(tmp_path / "checkpoint-8")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    for step in (2, 4):  # before the cuts, and between them
        again, _ = fine_tuned(tmp_path, str(tmp_path / f"checkpoint-{step}"))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
