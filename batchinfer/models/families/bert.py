"""BERT-like encoders, which norm the sum after each half of a layer.

BERT (Devlin et al., 2018) and MiniLM's checkpoints (Wang et al., 2020), RoBERTa (Liu et al., 2019), XLM-RoBERTa
(Conneau et al., 2019), MPNet (Song et al., 2020) and DistilBERT (Sanh et al., 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from batchinfer.models.families.classifier import classifier
from batchinfer.models.families.family import (
    ClassifierNames,
    ConfigFiles,
    Family,
    Modules,
    TableNames,
    activation,
    attention,
    hidden_size,
    layer_count,
    model,
    no_rotation,
)
from batchinfer.models.files.config_fields import Fields, shown
from batchinfer.models.spec.spec import (
    BUCKETS,
    EncoderSpec,
    FeedForwardSpec,
    HeadActivation,
    LayerSpec,
    ModelSpec,
    NormSpec,
)

# BERT's names of fields → DistilBERT's
DISTILBERT_FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
# Prefixes of heads for other tasks, and tables that are computed
UNREAD = ("pooler.", "cls.", "lm_head.", "classifier.", "qa_outputs.", "vocab_", "pre_classifier.")
IGNORED = ("embeddings.position_ids", "embeddings.token_type_ids")


def parse_bert(files: ConfigFiles) -> ModelSpec:
    """Convert a BertConfig to the model's spec. Error messages are appended to `files.mistakes`."""
    types = files.config.integer("type_vocab_size", 2)
    return _encoder("bert", files, EncoderSpec(token_types=types))


def parse_roberta(files: ConfigFiles) -> ModelSpec:
    """Convert a RobertaConfig to the model's spec. Error messages are appended to `files.mistakes`."""
    return _roberta("roberta", files)


def parse_xlm_roberta(files: ConfigFiles) -> ModelSpec:
    """Convert an XLMRobertaConfig to the model's spec. Error messages are appended to `files.mistakes`."""
    return _roberta("xlm-roberta", files)


def parse_mpnet(files: ConfigFiles) -> ModelSpec:
    """Convert an MPNetConfig to the model's spec. Error messages are appended to `files.mistakes`.

    Token positions start at row 2 of the table of learned positions.
    """
    buckets = files.config.integer("relative_attention_num_buckets", BUCKETS)
    if buckets != BUCKETS:
        files.mistakes.append(
            f"{files.config.name}: relative_attention_num_buckets is {buckets}; only {BUCKETS} is supported"
        )
    return _encoder("mpnet", files, EncoderSpec(first_position=2, distance_buckets=buckets))


def parse_distilbert(files: ConfigFiles) -> ModelSpec:
    """Convert a DistilBertConfig to the model's spec. Error messages are appended to `files.mistakes`."""
    files = replace(files, config=files.config.rename_keys(DISTILBERT_FIELDS))
    return _encoder("distilbert", files, EncoderSpec(), head_activation="relu")


def _roberta(family: str, files: ConfigFiles) -> ModelSpec:
    # Positions start after the id of the padding token
    fields = files.config
    types, first = fields.integer("type_vocab_size", 2), fields.integer("pad_token_id", 1, low=0) + 1
    return _encoder(family, files, EncoderSpec(token_types=types, first_position=first), absent_eos=(2,))


def _encoder(
    family: str,
    files: ConfigFiles,
    encoder: EncoderSpec,
    absent_eos: tuple[int, ...] = (),
    head_activation: HeadActivation = "tanh",
) -> ModelSpec:
    fields = files.config
    _check(fields)
    hidden = hidden_size(fields)
    norm = NormSpec(hidden, fields.number("layer_norm_eps", 1e-12), "layer", biased=True)
    fed = FeedForwardSpec(
        fields.integer("intermediate_size"),
        activation(fields, absent="gelu"),
        biased=True,
        gated=False,
    )
    attended = attention(fields, qkv_bias=True, o_bias=True, rotation=no_rotation)
    layer = LayerSpec(
        hidden, None, attended, None, fed, attention_norm=norm, feed_forward_norm=norm, norms_sums=True
    )
    made = model(
        family,
        files,
        (layer,) * layer_count(fields),
        norm=norm,
        absent_eos=absent_eos,
        learned_positions=True,
    )
    positions = made.max_positions - encoder.first_position
    if positions < 1:
        text = f"max_position_embeddings is {made.max_positions}; wanted more than {encoder.first_position}"
        files.mistakes.append(f"{fields.name}: {text}")
    return replace(
        made,
        tied=True,
        final_norm=None,
        max_positions=max(1, positions),
        encoder=replace(encoder, embedding_norm=norm, classifier=classifier(fields, head_activation)),
    )


def _check(fields: Fields) -> None:
    only: Mapping[str, object] = {
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
    }
    for key, wanted in only.items():
        found = fields.raw.get(key)
        if found is not None and found != wanted:
            fields.mistakes.append(
                f"{fields.name}: {key} is {shown(found)}; only {str(wanted).lower()} is supported"
            )


def bert_modules(_: LayerSpec) -> Modules:
    """Return, by parameter name, the modules that store a layer's parameters in BERT's checkpoints."""
    return {
        "q": "attention.self.query",
        "k": "attention.self.key",
        "v": "attention.self.value",
        "o": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "feed_forward_norm": "output.LayerNorm",
    }


def mpnet_modules(layer: LayerSpec) -> Modules:
    """Return, by parameter name, the modules that store a layer's parameters in MPNet's checkpoints."""
    parts = {name: f"attention.attn.{name}" for name in "qkvo"}
    return {**bert_modules(layer), **parts, "attention_norm": "attention.LayerNorm"}


def distilbert_modules(_: LayerSpec) -> Modules:
    """Return, by parameter name, the modules that store a layer's parameters in DistilBERT's checkpoints."""
    parts = {name: f"attention.{name}_lin" for name in "qkv"}
    return {
        **parts,
        "o": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "up": "ffn.lin1",
        "down": "ffn.lin2",
        "feed_forward_norm": "output_layer_norm",
    }


# BERT's classification head includes its pooler
POOLED = ClassifierNames("pooler.dense", "classifier", dense_in_base=True)
PROJECTED = ClassifierNames("classifier.dense", "classifier.out_proj")


def _names(base: str, head: ClassifierNames, layers: str = "encoder.layer") -> TableNames:
    return TableNames(
        base,
        "embeddings.word_embeddings",
        "embeddings.position_embeddings",
        layers,
        ignored=IGNORED,
        unread=UNREAD,
        classifier=head,
    )


def _classes(start: str) -> tuple[str, ...]:
    tops = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
    return (f"{start}Model", *(f"{start}For{top}" for top in tops))


BERT = Family(
    "bert", (*_classes("Bert"), "BertForPreTraining"), parse_bert, bert_modules, _names("bert.", POOLED)
)
ROBERTA = Family("roberta", _classes("Roberta"), parse_roberta, bert_modules, _names("roberta.", PROJECTED))
XLM_ROBERTA = Family(
    "xlm-roberta", _classes("XLMRoberta"), parse_xlm_roberta, bert_modules, _names("roberta.", PROJECTED)
)
MPNET = Family("mpnet", _classes("MPNet"), parse_mpnet, mpnet_modules, _names("mpnet.", PROJECTED))
DISTILBERT = Family(
    "distilbert",
    _classes("DistilBert"),
    parse_distilbert,
    distilbert_modules,
    _names("distilbert.", ClassifierNames("pre_classifier", "classifier"), "transformer.layer"),
)
