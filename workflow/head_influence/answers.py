"""The model's own greedy answers with the full cache."""

import copy

import torch
from transformers import DynamicCache

from head_influence import StudyError
from head_influence.json_files import read_json
from head_influence.models import whole_model


def stop_tokens(checkpoint):
    """Ids that end an answer, from generation_config.json or else config.json."""
    path = checkpoint.folder / "generation_config.json"
    found = (read_json(path) if path.exists() else {}).get("eos_token_id")
    if found is None:
        found = checkpoint.text_config.get("eos_token_id")
    return set(found if isinstance(found, list) else [] if found is None else [found])


def greedy_answers(checkpoint, context, most):
    """Answer every item of a context with the likeliest tokens.

    Parameters
    ----------
    checkpoint : Checkpoint
    context : TokenContext
    most : int
        Largest number of tokens.

    Returns
    -------
    dict
        Item id to list of token ids, without the token that ends the answer.

    Raises
    ------
    StudyError
        If an answer has no token that could be scored.
    """
    model, stop = whole_model(checkpoint), stop_tokens(checkpoint)
    model.set_attn_implementation("sdpa")
    before = DynamicCache(config=model.config)
    answers = {}
    with torch.no_grad():
        after_context = model(torch.tensor([context.ids]), cache=before, use_cache=True, logits_to_keep=1).logits
        for item in context.items:
            cache, logits = copy.deepcopy(before), after_context
            given, found = list(item.question), []
            while len(found) < most:
                if given:
                    logits = model(torch.tensor([given]), cache=cache, use_cache=True, logits_to_keep=1).logits
                token = int(logits[0, -1].argmax())
                if token in stop:
                    break
                found.append(token)
                given = [token]
            if len(found) < (1 if item.question else 2):
                raise StudyError(
                    f"context {context.id!r}, item {item.id!r}: the model's own greedy answer has no token to score; "
                    "set curves.answers to reference, or change the prompt"
                )
            answers[item.id] = found
    return answers
