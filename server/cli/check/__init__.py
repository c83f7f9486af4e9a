"""``foresay check``: can a target and who drafts for it work together, and what would mend it if not."""
