"""Plans and runs attention: every wrapper and every one-call function ends here."""
