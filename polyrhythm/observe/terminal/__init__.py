"""What a user sees in a terminal: the live view, plain lines, the summary at the end."""
