"""A Lightning Trainer with attemper's callback, logging to a CSV. Run: ``python examples/lightning_loop.py``."""

import tempfile
from pathlib import Path

import lightning.pytorch as lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from attemper.integrations.lightning import AttemperCallback
from attemper.lab.model import ByteConfig, ByteModel, encode, windows


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = ByteModel(ByteConfig(layers=2, context=64))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.net.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


torch.manual_seed(0)
loader = DataLoader(windows(encode(Path(__file__).read_text(encoding="utf-8") * 8), 64), batch_size=8)
logger, callback = CSVLogger(tempfile.mkdtemp()), AttemperCallback(every=10, rows=16)
trainer = lightning.Trainer(
    accelerator="cpu", max_steps=30, logger=logger, callbacks=[callback], enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Module(), loader)
print(callback.last)
print(f"logged to {logger.log_dir}/metrics.csv")
