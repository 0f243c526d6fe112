"""What ranks would import first; the process that they are forked from imports it once."""

from transformers import BertModel, GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

import gemini  # noqa: F401
import tests.models  # noqa: F401
