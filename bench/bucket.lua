-- A token bucket. KEYS[1]: its key. ARGV: tokens a second, capacity, tokens
-- wanted. Returns whether they were granted, and the tokens that are left.
local rate, capacity, count = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local bucket = redis.call('HMGET', KEYS[1], 'tokens', 'ts')
local tokens, ts = tonumber(bucket[1]) or capacity, tonumber(bucket[2]) or now
tokens = math.min(capacity, tokens + math.max(0, now - ts) * rate)
if tokens < count then
	return {0, tostring(tokens)}
end
tokens = tokens - count
redis.call('HSET', KEYS[1], 'tokens', tokens, 'ts', math.max(now, ts))
redis.call('PEXPIRE', KEYS[1], math.ceil(capacity / rate * 1000))
return {1, tostring(tokens)}
