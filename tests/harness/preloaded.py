"""What ranks would import first; the process that they are forked from imports it once."""

import gc

import pytest  # noqa: F401
from transformers import BertModel, GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

import gemini  # noqa: F401
import tests.zoo.models  # noqa: F401

# A collection after each case would look at a million objects of these modules, which takes a good part of a second.
gc.collect()
gc.freeze()
