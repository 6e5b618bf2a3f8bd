"""The package that SGLANG_EXTERNAL_MODEL_PACKAGE names: SGLang imports its modules and takes their `EntryClass`."""
