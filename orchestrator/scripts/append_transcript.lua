-- Appends to a transcript, and keeps it for a time: never for a shorter one than it had, since its episode may have its
-- receipt by now, written by a process that keeps receipts for longer.
-- Needs: lives.
-- KEYS: 1 transcript
-- ARGV: 1 retention seconds, 2 and after: entries
-- Returns: 1
for entry = 2, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[entry]) end
outlive(KEYS[1], ARGV[1] * 1000)
return 1
