# What this repository names in transformers, for pyright alone: a name that it does not know belongs here. The entrance
# of the package imports every model there is: 2,600 files, 16 CPU seconds more whenever types are checked.
from transformers.masking_utils import AttentionMaskInterface as AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.albert import *
from transformers.models.auto import *
from transformers.models.bart import *
from transformers.models.bert import *
from transformers.models.bloom import *
from transformers.models.clip import *
from transformers.models.cohere import *
from transformers.models.deberta_v2 import *
from transformers.models.deepseek_v3 import *
from transformers.models.deit import *
from transformers.models.dinov2 import *
from transformers.models.dinov3_vit import *
from transformers.models.distilbert import *
from transformers.models.electra import *
from transformers.models.falcon import *
from transformers.models.gemma import *
from transformers.models.gemma2 import *
from transformers.models.gemma3 import *
from transformers.models.gpt2 import *
from transformers.models.gpt_neox import *
from transformers.models.gpt_oss import *
from transformers.models.gptj import *
from transformers.models.granite import *
from transformers.models.kimi_k25 import *
from transformers.models.llama import *
from transformers.models.llama4 import *
from transformers.models.longformer import *
from transformers.models.minimax_m3_vl import *
from transformers.models.mistral import *
from transformers.models.mixtral import *
from transformers.models.modernbert import *
from transformers.models.olmo2 import *
from transformers.models.opt import *
from transformers.models.phi import *
from transformers.models.phi3 import *
from transformers.models.phi4_multimodal import *
from transformers.models.qwen2 import *
from transformers.models.qwen3 import *
from transformers.models.qwen3_moe import *
from transformers.models.roberta import *
from transformers.models.siglip import *
from transformers.models.stablelm import *
from transformers.models.starcoder2 import *
from transformers.models.t5 import *
from transformers.models.vit import *
from transformers.models.whisper import *
from transformers.trainer import Trainer as Trainer
from transformers.trainer_callback import TrainerCallback as TrainerCallback
from transformers.training_args import TrainingArguments as TrainingArguments
