"""Who scores responses: the task, a function on texts, or a sequence-classification model."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlloss.errors import BatchError, ConfigError
from rlloss.functional.moments import RunningMoments, clip_scores
from rlloss.training.extras import require
from rlloss.training.ppo_config import EvaluatorConfig
from rlloss.training.tasks import Question, Task

TextReward = Callable[[list[str]], Sequence[float] | Tensor]
"""From texts, prompt and response joined, to one number each."""


class Evaluator:
    """Scores responses, and scales the scores.

    Args:
        config: Who scores, and how scores are scaled.
        task: The task, whose own reward is the default.
        device: Where a model goes.
    """

    def __init__(self, config: EvaluatorConfig, task: Task, device: torch.device) -> None:
        self.config, self.task, self.device = config, task, device
        self.moments = RunningMoments()
        self._on_texts: TextReward | None = None
        if config.function is not None:
            self._on_texts = imported(config.function)
        elif config.folder is not None:
            self._on_texts = SequenceClassifier(config.folder, device, config.label, config.batch_size)

    def score(self, texts: Sequence[str], questions: Sequence[Question]) -> Tensor:
        """Returns the raw scores `[N]` of responses to questions.

        Raises:
            ConfigError: There is not one for each response.
            BatchError: One is not finite.
        """
        if not texts:  # a rank without rows
            return torch.zeros(0, device=self.device)
        if self._on_texts is None:
            pairs = zip(texts, questions, strict=True)
            values: Any = [self.task.reward(text, question) for text, question in pairs]
        else:
            values = self._on_texts([question.prompt + text for text, question in zip(texts, questions, strict=True)])
        scores = torch.as_tensor(values, dtype=torch.float32, device=self.device).reshape(-1)
        if scores.shape[0] != len(texts):
            raise ConfigError(f"the reward gave {scores.shape[0]} numbers for {len(texts)} texts; expected one each.")
        if not bool(scores.isfinite().all()):
            row = int((~scores.isfinite()).nonzero()[0, 0])
            raise BatchError(
                f"the reward of {texts[row]!r} is {float(scores[row])}. It must be a finite number: whitening would "
                f"spread it over the advantages of every response."
            )
        return scores

    def scaled(self, scores: Tensor) -> Tensor:
        """Takes notice of scores `[N]` and returns them scaled, centred and clipped as the config wants it."""
        if self.config.scale:
            self.moments.update(scores)
            scores = self.moments.scale(scores, self.config.center)
        return clip_scores(scores, self.config.clip)


class SequenceClassifier:
    """A sequence-classification model of transformers as a reward on texts.

    Args:
        folder: Folder with model and tokenizer.
        device: Where it goes.
        label: Which label is the score, when there is more than one; its logit is taken.
        batch_size: Texts at a time.

    Raises:
        ConfigError: The folder cannot be loaded, or the model cannot tell padding from text.
    """

    def __init__(self, folder: str, device: torch.device, label: int = -1, batch_size: int = 256) -> None:
        transformers = require("transformers")
        path = Path(folder)
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
            model = transformers.AutoModelForSequenceClassification.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"EvaluatorConfig: folder={folder!r} cannot be loaded: {error}") from error
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self._tokenizer.pad_token_id
        if model.config.pad_token_id is None:
            raise ConfigError(f"EvaluatorConfig: the model in {folder!r} has no padding token. Give its tokenizer one.")
        self._model: Any = model.eval().to(device)
        self._device, self._label, self._batch_size = device, label, batch_size

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> Tensor:
        """Returns the score of each text, `[N]`."""
        parts = []
        for start in range(0, len(texts), self._batch_size):
            encoded = self._tokenizer(texts[start : start + self._batch_size], padding=True, return_tensors="pt")
            inputs = {name: encoded[name].to(self._device) for name in ("input_ids", "attention_mask")}
            parts.append(self._model(**inputs).logits[:, self._label].float())
        return torch.cat(parts)


def imported(path: str) -> TextReward:
    """Imports a function by its dotted path.

    Raises:
        ConfigError: There is none.
    """
    module, _, name = path.rpartition(".")
    try:
        function: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"EvaluatorConfig: function={path!r}: {error}. Give package.module.function.") from error
    if not callable(function):
        raise ConfigError(f"EvaluatorConfig: function={path!r} is a {type(function).__name__}, expected a function.")
    return function  # type: ignore[no-any-return]
