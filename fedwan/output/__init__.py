"""What a run leaves behind: records, pictures, the summary, the report, and the live table."""
