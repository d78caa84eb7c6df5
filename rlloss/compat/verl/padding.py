"""verl's layouts: jagged rows `prompt | response` without padding, and responses padded to `[B, R]`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlloss.errors import BatchError


def read(data: Any, name: str, default: Any = None) -> Any:
    """Returns an entry of a dict or TensorDict, `default` when it is absent or None."""
    value = data[name] if name in data.keys() else default  # noqa: SIM118 (TensorDict has no `in`)
    return default if value is None else value


def require_entries(data: Any, names: tuple[str, ...], who: str) -> None:
    """Refuses data that lacks entries.

    Raises:
        BatchError: It names the missing and the present ones.
    """
    missing = [name for name in names if read(data, name) is None]
    if missing:
        raise BatchError(
            f"{who} needs {', '.join(map(repr, missing))} in data, which has {', '.join(map(repr, data.keys()))}."
        )


def no_padding_2_padding(values: Tensor, data: Any) -> Tensor:
    """Cuts the responses out of an engine's output and pads them on the right with 0.

    Entry j of a sample is about its token j + 1, so a response of k tokens that ends a sample at offset e is
    `values[e - k - 1 : e - 1]`: never an entry that belongs to another sample.

    Args:
        values: Jagged `[B, j, ...]` or flat `[total, ...]` over prompts and responses, with a graph.
        data: `prompts` and `responses`, jagged, or dense beside an `attention_mask`; optionally `max_response_len`.

    Returns:
        `[B, R, ...]`, R the longest response (or `max_response_len`), with a graph.

    Raises:
        BatchError: The lengths do not fit, or a prompt is empty.
    """
    flat = values.values() if values.is_nested else values
    prompt_lens, response_lens = _lengths(data, flat.device)
    width = int(read(data, "max_response_len", 0)) or int(max(response_lens.max().item(), 0))
    ends = (prompt_lens + response_lens).cumsum(0)
    total, shortest = int(ends[-1]), int(prompt_lens.min())
    if total != flat.shape[0] or shortest < 1 or int(response_lens.max()) > width:
        raise BatchError(
            f"the output has {flat.shape[0]} entries for {total} tokens of prompts and responses; the shortest prompt "
            f"has {shortest} tokens (at least 1 is needed to predict a first token), the longest response "
            f"{int(response_lens.max())} of at most {width}."
        )
    columns = torch.arange(width, device=flat.device)
    inside = columns[None] < response_lens[:, None]
    index = torch.where(inside, (ends - response_lens - 1)[:, None] + columns[None], 0)
    picked = flat.index_select(0, index.reshape(-1)).reshape(*index.shape, *flat.shape[1:])
    return torch.where(inside.reshape(*inside.shape, *[1] * (flat.ndim - 1)), picked, 0.0)


def slice_response_from_unpad_output(tensor: Tensor, data: Any) -> Tensor:
    """The older name of `no_padding_2_padding`; its jagged width is the longest response, not the total."""
    return no_padding_2_padding(tensor, data)


def response_from_nested(values: Tensor, response_mask: Tensor) -> Tensor:
    """Cuts the responses out of jagged output: jagged `[B, j]` -> jagged `[B, r]`, shifted like the padded form.

    Args:
        values: Jagged, over prompts and responses.
        response_mask: Jagged `[B, r]`; only its lengths are read.
    """
    ends, lengths = offsets_of(values)[1:], offsets_of(response_mask).diff()
    pieces = zip(ends.tolist(), lengths.tolist(), strict=True)
    rows = [values.values()[end - length - 1 : end - 1] for end, length in pieces]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def response_mask_of(data: Any, width: int) -> Tensor:
    """Returns the response mask `[B, width]` as bool, whatever its layout and type are."""
    padded = dense(read(data, "response_mask"), width)
    return torch.as_tensor(padded) != 0


def left_right_2_no_padding(data: Mapping[str, Any]) -> dict[str, Any]:
    """Takes the padding out of `input_ids` and `position_ids`, as the attention mask says.

    Args:
        data: `input_ids`, `attention_mask`, `position_ids` `[B, S]` and `response_mask` `[B, R]`; not written to.

    Returns:
        A new dict: jagged ids and positions, `loss_mask` (the response mask), `max_seq_len`, `max_response_len`, and
        `indices`, the flat places that were kept.
    """
    require_entries(data, ("input_ids", "attention_mask", "response_mask"), "left_right_2_no_padding")
    kept = read(data, "attention_mask") != 0
    offsets = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.sum(1).cumsum(0)])
    changed = {
        name: torch.nested.nested_tensor_from_jagged(read(data, name)[kept], offsets)
        for name in ("input_ids", "position_ids")
        if read(data, name) is not None
    }
    mask = read(data, "response_mask")
    facts = {
        "loss_mask": mask,
        "max_seq_len": int(kept.shape[1]),
        "max_response_len": int(mask.shape[1]),
        "indices": kept.reshape(-1).nonzero().squeeze(1),
    }
    return {**{name: data[name] for name in data.keys()}, **changed, **facts}  # noqa: SIM118


def offsets_of(jagged: Any) -> Tensor:
    """Returns where the rows of a jagged tensor begin and end, `[B + 1]`."""
    offsets: Tensor = jagged.offsets()
    return offsets


def dense(values: Tensor | None, width: int) -> Tensor | None:
    """Pads jagged responses `[B, r]` with 0 to `[B, width]`; dense ones stay as they are."""
    if values is None or not values.is_nested:
        return values
    return values.to_padded_tensor(0.0, (values.shape[0], width))


def _lengths(data: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens of each prompt and of each response, `[B]`."""
    require_entries(data, ("prompts", "responses"), "no_padding_2_padding")
    prompts, responses = read(data, "prompts"), read(data, "responses")
    if prompts.is_nested and responses.is_nested:
        return offsets_of(prompts).diff().to(device), offsets_of(responses).diff().to(device)
    require_entries(data, ("attention_mask",), "no_padding_2_padding on dense prompts and responses")
    attention = read(data, "attention_mask").to(device) != 0
    width = prompts.shape[1]
    return attention[:, :width].sum(1), attention[:, width:].sum(1)
