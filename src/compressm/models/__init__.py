"""Models built on the SSM layers: a residual block, a sequence classifier and a small language model."""

from compressm.models.block import Block, Blocks, Dropout, MixerBlock, OneMask, PerElement, ResidualBlock
from compressm.models.classifier import ClassifierState, SequenceClassifier
from compressm.models.encoder import EmbeddingEncoder, Encoder, LinearEncoder
from compressm.models.language_model import LanguageModel
from compressm.models.normalisation import BatchNorm, LayerNorm, NoNorm, Norm, RMSNorm, RunningNorm
from compressm.models.pooling import EveryStep, LastStep, MeanPooling, Pooling

__all__ = [
    "BatchNorm",
    "Block",
    "Blocks",
    "ClassifierState",
    "Dropout",
    "EmbeddingEncoder",
    "Encoder",
    "EveryStep",
    "LanguageModel",
    "LastStep",
    "LayerNorm",
    "LinearEncoder",
    "MeanPooling",
    "MixerBlock",
    "NoNorm",
    "Norm",
    "OneMask",
    "PerElement",
    "Pooling",
    "RMSNorm",
    "ResidualBlock",
    "RunningNorm",
    "SequenceClassifier",
]
