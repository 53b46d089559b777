"""The table of winners: for each problem and GPU, the fastest configs.

A table is a JSON file with a schema version. The package ships one file per GPU (chooser/tables).
A user's measurements are written to the user's own table, whose entries replace shipped ones.
"""

from flashsmith.chooser.winners.entry import Entry, RankedConfig
from flashsmith.chooser.winners.key import WinnerKey, bucket, kind_class
from flashsmith.chooser.winners.lookup import NearEntry
from flashsmith.chooser.winners.storage import require_user_table_path, user_table_path
from flashsmith.chooser.winners.table import (
    PREFERENCES,
    SCHEMA,
    WinnersTable,
    check_table,
    join_winners,
    record_winners,
    update_table,
)

__all__ = [
    "PREFERENCES",
    "SCHEMA",
    "Entry",
    "NearEntry",
    "RankedConfig",
    "WinnerKey",
    "WinnersTable",
    "bucket",
    "check_table",
    "join_winners",
    "kind_class",
    "record_winners",
    "require_user_table_path",
    "update_table",
    "user_table_path",
]
