-- Gives up a place in the line of those who wait to create; the next is woken where it has come nearer. Needs: limits.
-- KEYS: 1 limits, 2 line, 3 when each in line asks again, 4 wake list of this creation
-- ARGV: 1 creation id, 2 wake key prefix
-- Returns: 1
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('DEL', KEYS[4])
wake_next_creator(KEYS[1], KEYS[2], KEYS[3], ARGV[2])
return 1
