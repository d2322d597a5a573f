"""Which weights the engine serves: names, versions, receipts, and the pages computed from them."""
