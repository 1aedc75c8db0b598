"""transformers' Trainer with attemper's callback, on a tiny model. Run: ``python examples/trainer.py``."""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import attemper
from attemper.integrations.transformers import AttemperCallback

torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
ids = torch.tensor(list(Path(__file__).read_bytes()) * 8)
data = [{"input_ids": part, "labels": part} for part in ids.split(64) if len(part) == 64]
arguments = TrainingArguments(
    tempfile.mkdtemp(), max_steps=40, logging_steps=20, per_device_train_batch_size=4, learning_rate=3e-3,
    report_to="none", save_strategy="no", use_cpu=True, dataloader_pin_memory=False,
)  # fmt: skip

trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
callback = AttemperCallback(every=10, rows=16, trackers=[trainer])  # the trackers of report_to, whatever they are
trainer.add_callback(callback)
trainer.train()
print(callback.last)
print(attemper.open(f"{arguments.output_dir}/attemper"))  # every head of every sample
