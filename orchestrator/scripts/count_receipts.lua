-- Counts the receipts of a run that still stand.
-- KEYS: 1 when the run's receipts end
-- Returns: how many
return redis.call('ZCOUNT', KEYS[1], string.format('(%.0f', now_ms()), '+inf')
