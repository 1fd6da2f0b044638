"""The classification heads of encoders, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.models.families.family import activation
from batchinfer.models.files.config_fields import Fields, shown
from batchinfer.models.spec.spec import ClassifierSpec, HeadActivation, NormSpec

CLASSIFIES = "ForSequenceClassification"  # suffix of the classes with such a head
_POOLINGS = ("cls", "mean")
_USUAL_LABELS = 2  # if the configuration states no number


def classifier(fields: Fields, after_dense: HeadActivation) -> ClassifierSpec | None:
    """Return the spec of an encoder's classification head that pools the first token; None if its class has no head.

    Args:
        fields: The fields of config.json.
        after_dense: The activation between the classification head's two linear layers.
    """
    return ClassifierSpec(_labels(fields), after_dense) if _classifies(fields.raw) else None


def modernbert_classifier(fields: Fields, norm: NormSpec) -> ClassifierSpec | None:
    """Return the spec of ModernBERT's classification head, with configurable pooling; None if its class has no head.

    Args:
        fields: The fields of config.json.
        norm: The norm between the classification head's two linear layers.
    """
    if not _classifies(fields.raw):
        return None
    pooling = fields.text("classifier_pooling", "cls")
    if pooling not in _POOLINGS:
        wanted = f"wanted one of {', '.join(_POOLINGS)}"
        fields.mistakes.append(f"{fields.name}: classifier_pooling is {shown(pooling)}; {wanted}")
    return ClassifierSpec(
        _labels(fields),
        activation(fields, "classifier_activation", "gelu"),
        "mean" if pooling == "mean" else "cls",
        fields.boolean("classifier_bias", False),
        norm,
    )


def _classifies(raw: Mapping[str, Any]) -> bool:
    found = raw.get("architectures")
    return isinstance(found, list) and bool(found) and str(found[0]).endswith(CLASSIFIES)


def _labels(fields: Fields) -> int:
    named = fields.raw.get("id2label")
    if isinstance(named, dict) and named:
        return len(named)
    return fields.integer("num_labels", _USUAL_LABELS)
