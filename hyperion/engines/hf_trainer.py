"""Hugging Face Trainer.

For equal work, the Trainer needs these settings:

- The optimizer is that of the work. The Trainer's own optimizer also exempts norms from weight decay, but has betas of 0.9 and
  0.999.
- The sampler reads the rows in file order.
- The learning rate is constant.
- A row has one token more than is scored, because the model itself shifts the labels.
"""

from typing import Any

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from hyperion.engines.observer import Observer
from hyperion.engines.work import Work

EQUAL: dict[str, Any] = {"optimizer": True, "in_order": True, "lr_scheduler_type": "constant"}


def train(work: Work, observer: Observer, changed: dict[str, Any] | None = None) -> dict:
    """Perform the work and return the record.

    Args:
        work: the training work.
        observer: observer of this rank.
        changed: values that replace those of `EQUAL`. "optimizer": False uses the Trainer's AdamW with the learning rate, weight
            decay and eps of the work, but with the Trainer's betas; "in_order": False shuffles the rows; "lr_scheduler_type" is
            any schedule of the Trainer.
    """
    settings = EQUAL | (changed or {})
    model = work.load_model()
    each = work.batch_size // (observer.here.size * work.micro_batches)
    arguments = TrainingArguments(
        output_dir=str(observer.folder / "trainer"),
        max_steps=work.all_steps,
        per_device_train_batch_size=each,
        gradient_accumulation_steps=work.micro_batches,
        learning_rate=work.learning_rate,
        weight_decay=work.weight_decay,
        adam_epsilon=work.eps,
        lr_scheduler_type=settings["lr_scheduler_type"],
        max_grad_norm=work.clip_norm,
        bf16=work.dtype == "bf16",
        use_cpu=torch.device(observer.device).type == "cpu",
        # The Trainer's count of tokens synchronizes the device after each micro-batch, so it must not be in timed steps.
        include_num_input_tokens_seen="no" if work.timed else "all",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    optimizers = (work.adamw(model), None) if settings["optimizer"] else (None, None)
    rows = {"train_dataset": _Rows(work), "data_collator": _stacked}
    trainer = OrderedTrainer(model=model, args=arguments, optimizers=optimizers, **rows)
    trainer.in_file_order = settings["in_order"]
    trainer.add_callback(_Report(observer, trainer, model, work))
    trainer.train()
    return observer.finish(model.state_dict())


class _Rows(Dataset):
    """Rows for all steps. A row is both input and label, because the model shifts the labels itself."""

    def __init__(self, work: Work):
        self.tokens, self.length = work.tokens(), work.all_steps * work.batch_size
        self.work_rows = work.steps * work.batch_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.from_numpy(self.tokens[index % self.work_rows].copy())
        return {"input_ids": row, "labels": row}


def _stacked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class OrderedTrainer(Trainer):
    """Trainer that reads the rows in the order of the file. By default, a Trainer shuffles them."""

    in_file_order = True

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset: Any = train_dataset if train_dataset is not None else self.train_dataset
        return SequentialSampler(dataset) if self.in_file_order else super()._get_train_sampler(train_dataset)


class _Report(TrainerCallback):
    """Report each step to the observer, with the loss and the gradient norm that the Trainer logs."""

    def __init__(self, observer: Observer, trainer: Trainer, model: Any, work: Work):
        self.observer, self.trainer, self.model, self.work = observer, trainer, model, work
        self.seen = 0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.observer.start(self.trainer, self.model.get_input_embeddings(), self.model.state_dict())

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if not logs or "loss" not in logs:
            return
        # The Trainer counts the tokens that the model receives, summed over all ranks. The first token of a row is not scored. In
        # timed steps it counts none, so the tokens are those of its own batch size.
        tokens = int(state.num_input_tokens_seen) - self.seen
        self.seen += tokens
        scored = tokens * self.work.sequence_length // (self.work.sequence_length + 1)
        if self.work.timed:
            scored = args.train_batch_size * args.gradient_accumulation_steps * args.world_size * self.work.sequence_length
        self.observer.step(logs["loss"], logs.get("grad_norm"), scored if self.observer.here.rank == 0 else 0)
