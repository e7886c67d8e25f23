"""Data sets as tasks: splits, lengths, classes, vocabulary, and how to batch."""

from compressm.data.aan import AAN
from compressm.data.catalogue import CATALOGUE, make
from compressm.data.cifar import SequentialCIFAR
from compressm.data.dataset import DataSet, Form
from compressm.data.delayed_copy import DelayedCopy
from compressm.data.digits import Digits
from compressm.data.errors import DataError
from compressm.data.fetch import Store
from compressm.data.imdb import IMDB
from compressm.data.listops import ListOps
from compressm.data.lti_teacher import LTITeacher
from compressm.data.mnist import FashionMNIST, SequentialMNIST
from compressm.data.pathfinder import Pathfinder
from compressm.data.shuffling import Order
from compressm.data.task import IGNORED, Batch, Split, Task, TaskKind

__all__ = [
    "AAN",
    "CATALOGUE",
    "IGNORED",
    "IMDB",
    "Batch",
    "DataError",
    "DataSet",
    "DelayedCopy",
    "Digits",
    "FashionMNIST",
    "Form",
    "LTITeacher",
    "ListOps",
    "Order",
    "Pathfinder",
    "SequentialCIFAR",
    "SequentialMNIST",
    "Split",
    "Store",
    "Task",
    "TaskKind",
    "make",
]
