"""TRL's SFTTrainer with attemper's callback: fine-tuning, watched and stored. Run: ``python examples/trl_sft.py``.

It needs ``pip install trl``. The model is a small new one on bytes, so that nothing is downloaded.
"""

import tempfile

import torch
from datasets import Dataset
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from attemper.integrations.transformers import AttemperCallback

torch.manual_seed(0)
tokenizer = ByT5Tokenizer()
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
questions = [{"input_ids": tokenizer(f"What is {n} + {n}? {2 * n}").input_ids} for n in range(64)]
folder = tempfile.mkdtemp()
arguments = SFTConfig(
    folder, max_steps=12, per_device_train_batch_size=4, use_cpu=True, report_to="none", save_strategy="no",
    disable_tqdm=True, logging_steps=12,
)  # fmt: skip
callback = AttemperCallback(every=4, fewest_keys=8)
trainer = SFTTrainer(
    LlamaForCausalLM(config), arguments, train_dataset=Dataset.from_list(questions), processing_class=tokenizer,
    callbacks=[callback],
)  # fmt: skip
trainer.train()
print(callback.last)
