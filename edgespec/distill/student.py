"""The draft in torch: a few of the target's layers, its embedding, and a head over some of its tokens.

Owns how a draft is cut out of a target; the training changes everything but the embedding.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgespec.errors import ConfigError
from edgespec.export.skeleton import set_head_size

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
EMBEDDING = "model.embed_tokens.weight"


def check_shape(config: Any, layers: int, width: int | None) -> int:
    """The width of a draft's MLPs.

    Raises:
        ConfigError: the target has not so much to take from.
    """
    if layers > config.num_hidden_layers:
        raise ConfigError(f"layers is {layers}, but the target has only {config.num_hidden_layers}: ask for fewer")
    own = int(config.intermediate_size)
    if width is not None and width > own:
        raise ConfigError(f"width is {width}, but the target's layers have only {own} neurons: ask for fewer")
    return own if width is None else width


def draft_config(config: Any, chosen: Sequence[int], width: int, head_size: int) -> Any:
    """The configuration of a draft that starts from the `chosen` layers."""
    made = copy.deepcopy(config)
    count = config.num_hidden_layers
    for name, value in list(vars(made).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(made, name, [value[i] for i in chosen])
    made.num_hidden_layers = len(chosen)
    made.intermediate_size = width
    made.tie_word_embeddings = False
    made.head_size = head_size
    return made


def make_student(target: Any, chosen: Sequence[int], width: int, head_ids: NDArray[np.int64]) -> Any:
    """A draft with the target's weights in float32; its embedding is the target's and is not trained.

    Args:
        target: in torch.
        chosen: numbers of its layers, ascending.
        width: neurons of each MLP that are kept: those that move the most.
        head_ids: tokens of the head.
    """
    from transformers import AutoModelForCausalLM

    config = draft_config(target.config, chosen, width, len(head_ids))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    set_head_size(model, len(head_ids))
    theirs = target.state_dict()
    model.load_state_dict({name: _inherit(name, theirs, chosen, width, head_ids) for name in model.state_dict()})
    model = model.to(target.device)
    model.model.embed_tokens.weight.requires_grad_(False)
    model.config.use_cache = False
    return model.train()


def trained_names(model: Any) -> list[str]:
    """Names of the weights that training changes."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _inherit(
    name: str, theirs: dict[str, Any], chosen: Sequence[int], width: int, head_ids: NDArray[np.int64]
) -> torch.Tensor:
    if name == "lm_head.weight":
        return theirs[name][torch.from_numpy(head_ids).to(theirs[name].device)].float()
    found = _LAYER.fullmatch(name)
    if found is None:
        return theirs[name].float()
    prefix = f"model.layers.{chosen[int(found[1])]}."
    weight = theirs[prefix + found[2]].float()
    if "mlp." not in found[2]:
        return weight
    neurons = _important(theirs[f"{prefix}mlp.up_proj.weight"], theirs[f"{prefix}mlp.down_proj.weight"], width)
    return weight[:, neurons] if "down_proj.weight" in name else weight[neurons] if "down" not in name else weight


def _important(up: Any, down: Any, width: int) -> torch.Tensor:
    """The neurons whose way through the MLP has the largest weights, ascending."""
    score = up.float().norm(dim=1) * down.float().norm(dim=0)
    return score.topk(width).indices.sort().values
