"""Data sets as tasks: splits, lengths, classes, vocabulary, and how to batch."""

from compressm_lab.data.catalogue import CATALOGUE, make
from compressm_lab.data.dataset import DataSet, Form, Source
from compressm_lab.data.files import Store
from compressm_lab.data.images import Digits, FashionMNIST, SequentialCIFAR, SequentialMNIST
from compressm_lab.data.listops import ListOps
from compressm_lab.data.pathfinder import Pathfinder
from compressm_lab.data.synthetic import DelayedCopy, LTITeacher
from compressm_lab.data.table import Table
from compressm_lab.data.task import IGNORED, Batch, DataError, Order, Split, Task, TaskKind
from compressm_lab.data.text import AAN, IMDB

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
    "Source",
    "Split",
    "Store",
    "Table",
    "Task",
    "TaskKind",
    "make",
]
