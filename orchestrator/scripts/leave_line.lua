-- Gives up a place in line; the next in it are woken, since a wake may be lost with it (popped, but not asked with).
-- Needs: limits.
-- KEYS: 1 waiters, 2 when they asked last, 3 batches in line, 4 who stepped back, 5 wake list of who leaves
-- ARGV: 1 episode, or batch, 2 wake key prefix
-- Returns: 1
for i = 1, 4 do redis.call('ZREM', KEYS[i], ARGV[1]) end
redis.call('DEL', KEYS[5])
wake_line(KEYS[1], KEYS[3], ARGV[2])
return 1
