"""Generation engines: what they must offer (`contract`), the torch engine with its models, and how one is chosen
(`registry`). Importing this package, `contract` or `registry` imports no torch."""
