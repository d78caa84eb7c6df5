"""The policy: a causal language model of transformers, cut into a backbone and a head."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlloss.errors import ConfigError
from rlloss.losses.lm_head import LMHead
from rlloss.training.config import ModelConfig
from rlloss.training.extras import require

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


@dataclass(frozen=True)
class TokenBatch:
    """Token ids with what a model has to know about their padding, all `[B, T]`."""

    input_ids: Tensor
    attention_mask: Tensor
    """1 at tokens that are there, 0 at padding."""

    @property
    def position_ids(self) -> Tensor:
        """Places counted over the tokens that are there, as generation counts them; 0 at padding."""
        mask = self.attention_mask
        return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)

    def rows(self, index: Tensor) -> "TokenBatch":
        """Returns some of the rows."""
        return TokenBatch(self.input_ids[index], self.attention_mask[index])


def hidden_states(backbone: nn.Module, batch: TokenBatch) -> Tensor:
    """Returns what a backbone puts under the head, `[B, T, H]`, with the positions and the mask of generation."""
    takes_positions = "position_ids" in inspect.signature(backbone.forward).parameters
    positions = {"position_ids": batch.position_ids} if takes_positions else {}
    output = backbone(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, **positions)
    return output.last_hidden_state  # type: ignore[no-any-return]


class Network(nn.Module):
    """Backbone and head in one call, so that a wrapper which gathers weights has them there while the loss reads them.

    Args:
        model: A model of transformers with a head.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def head(self) -> LMHead:
        """The output embeddings."""
        return self.model.get_output_embeddings()  # type: ignore[no-any-return]

    def forward(self, batch: TokenBatch, loss_ctx: Any, **arguments: Any) -> Any:
        """Returns what `loss_ctx.forward` gives on the hidden states of a batch and the head.

        Args:
            batch: Tokens.
            loss_ctx: A calibrated context.
            **arguments: More arguments of its `forward`, such as a value head.
        """
        return self.head(hidden_states(self.model.base_model, batch), loss_ctx, **arguments)


class Policy:
    """A causal language model with its tokenizer.

    Args:
        model: A model of transformers with a head.
        tokenizer: Its tokenizer, with an end-of-sequence token.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("The tokenizer has no end-of-sequence token, so responses would never end. Give it one.")
        self.model = model.eval()  # dropout would make the ratio of the first update differ from 1
        self.tokenizer = tokenizer
        self.eos_ids = _eos_ids(model, tokenizer)
        self.pad_id: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        _take_loss_head(model)
        self.network = Network(model)

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.model.device  # type: ignore[no-any-return]

    @property
    def logit_options(self) -> dict[str, float]:
        """Fields of a loss config that say what this model does to its logits."""
        config = self.model.config
        options = {}
        if getattr(config, "final_logit_softcapping", None):
            options["logit_softcap"] = float(config.final_logit_softcapping)
        if getattr(config, "logit_scale", None) and config.model_type.startswith("cohere"):
            options["logit_scale"] = float(config.logit_scale)
        if getattr(config, "logits_scaling", None):
            options["logit_scale"] = 1.0 / float(config.logits_scaling)
        return options

    @contextmanager
    def whole(self, weights: Mapping[str, Tensor] | None = None) -> Iterator["Policy"]:
        """Gives a policy that has all of its weights on this rank, to generate or to score; no gradients.

        Args:
            weights: What `model.state_dict()` returned once; None takes the present weights.
        """
        if weights is None:
            yield self
            return
        present = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(weights)
        try:
            yield self
        finally:
            self.model.load_state_dict(present)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without special tokens of the tokenizer's own."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_prompt(self, text: str, chat: bool) -> list[int]:
        """Returns the token ids of a prompt, within the chat template if wanted."""
        if not chat:
            return list(self.tokenizer(text)["input_ids"])
        message = [{"role": "user", "content": text}]
        rendered = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return self.encode(rendered)

    def decode(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """Returns the texts of token ids, without special tokens."""
        return list(self.tokenizer.batch_decode(list(rows), skip_special_tokens=True))

    def left_padded(self, prompts: Sequence[Sequence[int]]) -> TokenBatch:
        """Returns prompts padded on the left, `[B, T]`."""
        width = max(len(prompt) for prompt in prompts)
        ids = [[self.pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return TokenBatch(torch.tensor(ids, device=self.device), torch.tensor(mask, device=self.device))

    def save(self, folder: Path) -> None:
        """Saves model and tokenizer as transformers does, to be loaded by `model.folder`."""
        logging = require("transformers.utils.logging")
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # it would cut through ours
        try:
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        finally:
            if shown:
                logging.enable_progress_bar()

    @torch.no_grad()
    def check_head(self, tolerance: float) -> None:
        """Compares `head(hidden)` with the model's own logits on a few tokens.

        Raises:
            ConfigError: They differ, so this model does something in between that no loss field describes.
        """
        ids = torch.tensor([self.encode("12") or [self.pad_id]], device=self.device)
        batch = TokenBatch(ids, torch.ones_like(ids))
        options = self.logit_options
        logits = self.network.head(hidden_states(self.model.base_model, batch)) * options.get("logit_scale", 1.0)
        if "logit_softcap" in options:
            logits = options["logit_softcap"] * torch.tanh(logits / options["logit_softcap"])
        expected = self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        gap = (logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        if not gap <= tolerance:
            raise ConfigError(
                f"{type(self.model).__name__} does not compute its logits as head(hidden states): relative difference "
                f"{float(gap):.1e}, at most {tolerance:.0e} is expected. Choose another architecture."
            )


def load_policy(config: ModelConfig, texts: Iterable[str], device: str) -> Policy:
    """Loads the folder, or makes a small Qwen3 whose characters are those of the texts.

    Args:
        config: Folder or sizes.
        texts: Prompts and answers of the task; only the character tokenizer looks at them.
        device: Where the model goes, as torch names it.
    """
    if config.folder is None:
        tokenizer = character_tokenizer(texts)
        model = _small_qwen3(config, tokenizer)
    else:
        model, tokenizer = _from_folder(config.folder)
    policy = Policy(model.to(device=device, dtype=getattr(torch, config.dtype)), tokenizer)
    policy.check_head(1e-4 if config.dtype == "float32" else 5e-2)
    # a folder's own sampling defaults (top-p, repetition penalty) would make the sampled policy another one
    model.generation_config = require("transformers").GenerationConfig(
        pad_token_id=policy.pad_id, eos_token_id=list(policy.eos_ids)
    )
    return policy


def _take_loss_head(model: Any) -> None:
    """Puts an `LMHead` with the same weights in the place of the model's head."""
    head = model.get_output_embeddings()
    if isinstance(head, LMHead):
        return
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"{type(model).__name__} has a {type(head).__name__} for a head, expected nn.Linear. Choose another "
            f"architecture."
        )
    mine = LMHead(head.in_features, head.out_features, head.bias is not None, device="meta")
    mine.weight, mine.bias = head.weight, head.bias
    model.set_output_embeddings(mine)


def character_tokenizer(texts: Iterable[str]) -> Any:
    """Returns a tokenizer of transformers with one token for each character of the texts."""
    tokenizers = require("tokenizers")
    characters = sorted(set().union(*texts))
    vocabulary = {token: place for place, token in enumerate([PAD, EOS, UNKNOWN, *characters])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    return require("transformers").PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _small_qwen3(config: ModelConfig, tokenizer: Any) -> Any:
    transformers = require("transformers")
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden,
            intermediate_size=config.mlp,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.hidden // config.heads,
            tie_word_embeddings=config.tie_embeddings,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def _from_folder(folder: str) -> tuple[Any, Any]:
    transformers = require("transformers")
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"ModelConfig: folder={folder!r} has no config.json, so it is no model saved by transformers "
            "(`model.save_pretrained(folder)` and `tokenizer.save_pretrained(folder)` make one)."
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"ModelConfig: folder={folder!r} cannot be loaded: {error}") from error
    return model, tokenizer


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [] if configured is None else [configured]
    return tuple(dict.fromkeys([int(tokenizer.eos_token_id), *(int(token) for token in listed)]))
