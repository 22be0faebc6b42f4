"""Find losses that a model's configuration adds to the loss of the task, and that ftcli does not train.

A model with experts asks for a loss of its router with `output_router_logits`. transformers adds it in the forward pass
of causal models if labels are passed. ftcli computes the loss itself, from the logits. Imports no library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROUTER_KEYS = ("router_aux_loss_coef", "aux_loss_coef", "router_z_loss_coef")
Z_LOSS = "z_loss_coefficient"
# Argument with which a forward pass computes no loss of the router. Models compute it even without labels, from the
# attention mask. They fail if the mask has other tokens than the pass, as with a cache, or is not [B, T].
WITHOUT_ROUTER_LOSS = {"output_router_logits": False}


def left_out_losses(config: Mapping[str, Any]) -> list[str]:
    """Return one line about the losses that a configuration asks for; nothing if it asks for none.

    Args:
        config: A model's configuration, as in config.json. That of a text model may be inside it.
    """
    text = config.get("text_config")
    owners = [config, text] if isinstance(text, Mapping) else [config]
    for owner in owners:
        given = {key: owner[key] for key in ROUTER_KEYS if owner.get(key) is not None}
        asked = [key for key, factor in given.items() if factor] if owner.get("output_router_logits") else []
        if owner.get("output_router_logits") and not given:
            asked = [ROUTER_KEYS[0]]
        asked += [Z_LOSS] if owner.get(Z_LOSS) else []
        if asked:
            return [
                f"the model's configuration asks for a further loss ({', '.join(asked)}), which ftcli does not train: "
                "the loss is lower than that of transformers' Trainer, and nothing keeps a trained router from using "
                "few of the experts"
            ]
    return []
