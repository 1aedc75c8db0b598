"""The cases of the five source documents: one file a document."""

from tests.articles.cases.document_000 import DOCUMENT as DOCUMENT_000
from tests.articles.cases.document_001 import DOCUMENT as DOCUMENT_001
from tests.articles.cases.document_002 import DOCUMENT as DOCUMENT_002
from tests.articles.cases.document_003 import DOCUMENT as DOCUMENT_003
from tests.articles.cases.document_004 import DOCUMENT as DOCUMENT_004

DOCUMENTS = (DOCUMENT_000, DOCUMENT_001, DOCUMENT_002, DOCUMENT_003, DOCUMENT_004)
