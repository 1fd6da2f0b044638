"""The list of families. To add one, write a file in this folder, and add it here."""

from __future__ import annotations

from batchinfer.models.families.bert import BERT, DISTILBERT, MPNET, ROBERTA, XLM_ROBERTA
from batchinfer.models.families.cohere import COHERE, COHERE2
from batchinfer.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from batchinfer.models.families.family import Family
from batchinfer.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from batchinfer.models.families.gpt import GPT2, GPT_NEOX
from batchinfer.models.families.gpt_oss import GPT_OSS
from batchinfer.models.families.granite import GRANITE
from batchinfer.models.families.llama import LLAMA, MISTRAL
from batchinfer.models.families.mixtral import MIXTRAL
from batchinfer.models.families.modernbert import MODERNBERT
from batchinfer.models.families.olmo2 import OLMO2
from batchinfer.models.families.phi3 import PHI3
from batchinfer.models.families.qwen import QWEN2, QWEN3
from batchinfer.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from batchinfer.models.families.stablelm import STABLELM

_KNOWN = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, GRANITE, OLMO2, PHI3, STABLELM),
    *(MIXTRAL, QWEN2_MOE, QWEN3_MOE),
    *(GEMMA, GEMMA2, GEMMA3, COHERE, COHERE2, GPT2, GPT_NEOX, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS),
    *(BERT, DISTILBERT, ROBERTA, XLM_ROBERTA, MPNET, MODERNBERT),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _KNOWN}
