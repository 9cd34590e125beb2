"""Pictures and videos as users send them: from bytes to grids of patches, and from grids to prompts."""
