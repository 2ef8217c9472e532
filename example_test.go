package ratelimit_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// noon is where the examples' clocks start; a program leaves the clock to the
// database.
var noon = time.Date(2025, 3, 14, 12, 0, 0, 0, time.UTC)

// check ends the program for an error.
func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Definitions are values. They are kept where the code that they limit is.
func Example() {
	sendMessage := ratelimit.TokenBucket{Name: "send_message", Rate: 10, Period: time.Minute, Capacity: 20}

	// In memory here; package pgstore has the same verbs on PostgreSQL.
	store := memstore.New(func() time.Time { return noon })

	res, err := store.Allow(context.Background(), sendMessage.For("alice"))
	check(err)
	fmt.Println(res.OK, res.Remaining)
	// Output: true 19
}

// A burst of three, and then one every six seconds.
func ExampleTokenBucket() {
	now := noon
	store := memstore.New(func() time.Time { return now })
	limit := ratelimit.TokenBucket{Name: "send_message", Rate: 10, Period: time.Minute, Capacity: 3}

	for range 5 {
		res, err := store.Allow(context.Background(), limit.For("alice"))
		check(err)
		fmt.Println(now.Format(time.TimeOnly), res.OK, res.Remaining, res.RetryAfter)
		now = now.Add(res.RetryAfter) // the same call made then succeeds
	}
	// Output:
	// 12:00:00 true 2 0s
	// 12:00:00 true 1 0s
	// 12:00:00 true 0 0s
	// 12:00:00 false 0 6s
	// 12:00:06 true 0 0s
}

// Never more than three calls in any minute, wherever it begins; the slots are 20
// seconds long, and begin on the minute because of Start. What was taken in one of them
// is back four slots later.
func ExampleSlidingWindow() {
	now := noon
	store := memstore.New(func() time.Time { return now })
	limit := ratelimit.SlidingWindow{Name: "call_partner", Rate: 3, Period: time.Minute, Slots: 3, Start: noon}

	for range 6 {
		res, err := store.Allow(context.Background(), limit.For(""))
		check(err)
		fmt.Println(now.Format(time.TimeOnly), res.OK, res.Remaining, res.RetryAfter)
		now = now.Add(15*time.Second + res.RetryAfter)
	}
	// Output:
	// 12:00:00 true 2 0s
	// 12:00:15 true 1 0s
	// 12:00:30 true 0 0s
	// 12:00:45 false 0 35s
	// 12:01:35 true 1 0s
	// 12:01:50 true 1 0s
}

// Two sign-ups an hour, all of them at once if need be; the hours begin on
// the hour because of Start.
func ExampleFixedWindow() {
	now := noon.Add(40 * time.Minute)
	store := memstore.New(func() time.Time { return now })
	limit := ratelimit.FixedWindow{
		Name: "sign_up", Rate: 2, Period: time.Hour,
		Start: time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC),
	}

	for range 4 {
		res, err := store.Allow(context.Background(), limit.For(""))
		check(err)
		fmt.Println(now.Format(time.TimeOnly), res.OK, res.Remaining, res.RetryAfter)
		now = now.Add(res.RetryAfter)
	}
	// Output:
	// 12:40:00 true 1 0s
	// 12:40:00 true 0 0s
	// 12:40:00 false 0 20m0s
	// 13:00:00 true 1 0s
}

// A quota by the month, from the day on which a customer in Berlin has subscribed.
func ExampleFixedWindow_calendar() {
	berlin, err := time.LoadLocation("Europe/Berlin")
	check(err)
	now := time.Date(2025, 1, 31, 15, 0, 0, 0, berlin) // when the customer subscribes
	store := memstore.New(func() time.Time { return now })
	quota := ratelimit.FixedWindow{
		Name: "quota", Rate: 100,
		Every: ratelimit.Month, Zone: berlin.String(), Anchor: ratelimit.DateOf(now),
	}
	for range 3 {
		res, err := store.Allow(context.Background(), quota.ForN("customer", 80))
		check(err)
		fmt.Println(now.Format(time.DateTime), res.OK, res.Remaining, res.RetryAt.In(berlin).Format(time.DateTime))
		now = now.AddDate(0, 0, 14)
	}
	// Output:
	// 2025-01-31 15:00:00 true 20 2025-01-31 15:00:00
	// 2025-02-14 15:00:00 false 20 2025-02-28 00:00:00
	// 2025-02-28 15:00:00 true 20 2025-02-28 15:00:00
}

// A plan for a year that is used by the month: months that were not used roll over until the
// contract ends.
func ExampleFixedWindow_annualPlan() {
	begun := ratelimit.Date{Year: 2024, Month: time.February, Day: 29}
	now := time.Date(2024, 2, 29, 9, 0, 0, 0, time.UTC)
	store := memstore.New(func() time.Time { return now })
	monthly := ratelimit.FixedWindow{Name: "monthly", Rate: 100, Capacity: 1200, Every: ratelimit.Month, Anchor: begun}
	yearly := ratelimit.FixedWindow{Name: "yearly", Rate: 1200, Every: ratelimit.Year, Anchor: begun}

	// A limit begins full. What the later months bring is taken off when the plan is booked.
	_, err := store.Allow(context.Background(), monthly.ForN("customer", 1100))
	check(err)
	for _, n := range []float64{40, 150, 100} {
		res, err := store.Allow(context.Background(), monthly.ForN("customer", n), yearly.ForN("customer", n))
		check(err)
		fmt.Println(now.Format(time.DateOnly), res.OK, res.Several[0].Remaining, res.Several[1].Remaining)
		now = now.AddDate(0, 1, 0)
	}
	d := yearly.Definition()
	_, ends := d.Window("customer", now)
	fmt.Println("the year ends on", ends.Format(time.DateOnly))
	// Output:
	// 2024-02-29 true 60 1160
	// 2024-03-29 true 10 1010
	// 2024-04-29 true 10 910
	// the year ends on 2025-02-28
}

// A day on which summer time begins is 23 hours long, and its quota is the same.
func ExampleDefinition_Window() {
	daily := ratelimit.FixedWindow{Name: "daily", Rate: 100, Every: ratelimit.Day, Zone: "Europe/Berlin"}
	d := daily.Definition()
	from, to := d.Window("customer", time.Date(2026, 3, 29, 12, 0, 0, 0, time.UTC))
	fmt.Println(from, to, to.Sub(from))
	// Output: 2026-03-28 23:00:00 +0000 UTC 2026-03-29 22:00:00 +0000 UTC 23h0m0s
}

// A customer who moves to New York in the night in which April has begun in Berlin has used what
// he has used: April does not begin for him a second time.
func ExampleFixedWindow_customerWhoMoves() {
	now := time.Date(2026, 3, 31, 23, 0, 0, 0, time.UTC) // 01:00 on 1 April in Berlin
	store := memstore.New(func() time.Time { return now })
	quota := ratelimit.FixedWindow{Name: "quota", Rate: 100, Every: ratelimit.Month, Zone: "Europe/Berlin"}
	for range 2 {
		res, err := store.Allow(context.Background(), quota.ForN("customer", 80))
		check(err)
		fmt.Println(quota.Zone, res.OK, res.Remaining, res.RetryAt)
		now = now.Add(6 * time.Hour) // 01:00 on 1 April in New York
		quota.Zone = "America/New_York"
	}
	// Output:
	// Europe/Berlin true 20 2026-03-31 23:00:00 +0000 UTC
	// America/New_York false 20 2026-05-01 04:00:00 +0000 UTC
}

// Of all calls, the one that takes the use to four fifths is told to warn the customer.
func ExampleStatus_Crossed() {
	store := memstore.New(func() time.Time { return noon })
	quota := ratelimit.FixedWindow{Name: "quota", Rate: 10, Every: ratelimit.Month}
	for i := range 10 {
		res, err := store.Allow(context.Background(), quota.For("customer"))
		check(err)
		if res.Crossed(0.8) {
			fmt.Println("call", i+1, "leaves", res.Remaining)
		}
	}
	// Output: call 8 leaves 2
}

// Batch work leaves half of the limit to others, and who takes it below a fifth is told.
func ExampleRequest_Above() {
	store := memstore.New(func() time.Time { return noon })
	api := ratelimit.TokenBucket{Name: "api", Rate: 100, Period: time.Second}
	for _, r := range []ratelimit.Request{
		api.ForN("customer", 50).Above(0.5), api.For("customer").Above(0.5), api.ForN("customer", 40),
	} {
		res, err := store.Allow(context.Background(), r)
		check(err)
		fmt.Println(res, res.Crossed(0.8))
	}
	// Output:
	// 50 of "api" above 0.5: ok, 50 of 100 left false
	// 1 of "api" above 0.5: refused, retry after 10ms, 50 of 100 left false
	// 40 of "api": ok, 10 of 100 left true
}

// A customer's plan is a copy of the definition with a rate of its own.
func ExampleTokenBucket_plans() {
	store := memstore.New(func() time.Time { return noon })
	free := ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Second}
	paid := free
	paid.Rate = 100

	for _, r := range []ratelimit.Request{free.For("alice"), paid.For("bob")} {
		res, err := store.Allow(context.Background(), r)
		check(err)
		fmt.Println(r.Key, res.Remaining, "of", res.Capacity)
	}
	// Output:
	// alice 9 of 10
	// bob 99 of 100
}

// Several limits in one call: all or nothing. Here the tokens are short, so
// the request is not counted either.
func Example_severalLimits() {
	ctx := context.Background()
	store := memstore.New(func() time.Time { return noon })
	requests := ratelimit.TokenBucket{Name: "llm_requests", Rate: 60, Period: time.Minute}
	tokens := ratelimit.TokenBucket{Name: "llm_tokens", Rate: 40_000, Period: time.Minute}

	for range 2 {
		res, err := store.Allow(ctx, requests.For("acme"), tokens.ForN("acme", 30_000))
		check(err)
		fmt.Println(res.OK, res.RetryAfter)
		for _, s := range res.Each() {
			fmt.Println(" ", s.Request.Limit.Definition().Name, s.OK, s.Remaining)
		}
	}
	// Output:
	// true 0s
	//   llm_requests true 59
	//   llm_tokens true 10000
	// false 30s
	//   llm_requests true 59
	//   llm_tokens false 10000
}

// A reservation goes into debt and says when the work may run. The caller
// schedules it for then, and does not ask again.
func Example_reserve() {
	store := memstore.New(func() time.Time { return noon })
	limit := ratelimit.TokenBucket{Name: "third_party", Rate: 1, Period: time.Second, Capacity: 2, MaxReserved: 2}

	for range 5 {
		res, err := store.Reserve(context.Background(), limit.For(""))
		check(err)
		fmt.Println(res.OK, res.RetryAt.Format(time.TimeOnly))
	}
	// Output:
	// true 12:00:00
	// true 12:00:00
	// true 12:00:01
	// true 12:00:02
	// false 12:00:01
}

// A count that can never be granted is an error, and not a wait.
func ExampleExceedsCapacityError() {
	store := memstore.New(func() time.Time { return noon })
	limit := ratelimit.TokenBucket{Name: "llm_tokens", Rate: 40_000, Period: time.Minute}

	_, err := store.Allow(context.Background(), limit.ForN("acme", 50_000))
	fmt.Println(errors.Is(err, ratelimit.ErrExceedsCapacity))
	var exceeds *ratelimit.ExceedsCapacityError
	if errors.As(err, &exceeds) {
		fmt.Println("at most", exceeds.Most)
	}
	fmt.Println(err)
	// Output:
	// true
	// at most 40000
	// ratelimit: limit "llm_tokens": 50000 tokens can never be allowed at once, at most 40000 can
}

// Validate, in a test, finds every bad field of a definition. The verbs
// return the same errors.
func ExampleFieldError() {
	limit := ratelimit.TokenBucket{Name: "send_message", Rate: -10, Capacity: 20}

	err := limit.Validate()
	fmt.Println(errors.Is(err, ratelimit.ErrInvalid))
	var field *ratelimit.FieldError
	if errors.As(err, &field) {
		fmt.Println("first:", field.Field, field.Value)
	}
	fmt.Println(err)
	// Output:
	// true
	// first: Rate -10
	// ratelimit: limit "send_message": Rate -10: must not be negative
	// ratelimit: limit "send_message": Period 0s: must be positive
}

// A refusal is a result, so that it does not roll back a transaction that has
// other work in it. Err makes it an error for callers that return one.
func ExampleResult_Err() {
	store := memstore.New(func() time.Time { return noon })
	limit := ratelimit.TokenBucket{Name: "password", Rate: 1, Period: time.Minute}

	try := func() error {
		res, err := store.Allow(context.Background(), limit.For("alice"))
		if err != nil {
			return err
		}
		return res.Err()
	}
	fmt.Println(try())
	err := try()
	fmt.Println(err)
	var refused *ratelimit.RefusedError
	if errors.As(err, &refused) {
		fmt.Println("Retry-After:", refused.Result.RetryAfter.Seconds())
	}
	// Output:
	// <nil>
	// ratelimit: limit "password" refused, retry after 1m0s
	// Retry-After: 60
}

// A reservation whose work will not run is cancelled: what it took is given
// back, once.
func Example_cancel() {
	ctx := context.Background()
	store := memstore.New(func() time.Time { return noon })
	limit := ratelimit.TokenBucket{Name: "third_party", Rate: 1, Period: time.Second, Capacity: 2}

	res, err := store.Reserve(ctx, limit.ForN("", 5))
	check(err)
	fmt.Println(res.Value)
	for range 2 {
		cancelled, err := store.Cancel(ctx, res.Receipt)
		check(err)
		fmt.Println("cancelled:", cancelled)
	}
	after, err := store.Check(ctx, limit.ForN("", 0))
	check(err)
	fmt.Println(after.Value)
	// Output:
	// -3
	// cancelled: true
	// cancelled: false
	// 2
}

// A third party answered 429 with a Retry-After of 30 seconds: nothing is
// allowed before, and nothing that was saved up is left after.
func Example_pause() {
	ctx := context.Background()
	now := noon
	store := memstore.New(func() time.Time { return now })
	limit := ratelimit.TokenBucket{Name: "third_party", Rate: 1, Period: time.Second, Capacity: 10}

	until, err := store.Pause(ctx, limit, "", 30*time.Second)
	check(err)
	fmt.Println("until", until.Format(time.TimeOnly))
	for range 2 {
		res, err := store.Allow(ctx, limit.For(""))
		check(err)
		fmt.Println(now.Format(time.TimeOnly), res.OK, res.Remaining, res.RetryAfter)
		now = now.Add(res.RetryAfter)
	}
	// Output:
	// until 12:00:30
	// 12:00:00 false 0 31s
	// 12:00:31 true 0 0s
}

// The parts of a key cannot run into each other: a user who chooses a name with
// a colon in it does not get another's key.
func ExampleKey() {
	fmt.Println(ratelimit.Key("org 7", "alice"))
	fmt.Println(ratelimit.Key("org 7", "alice:admin"))
	fmt.Println(ratelimit.Key("org 7", "alice", "admin"))
	// Output:
	// org 7:alice
	// org 7:alice\:admin
	// org 7:alice:admin
}

// A test, or the program's start, looks at all its limits at once.
func ExampleValidate() {
	err := ratelimit.Validate(
		ratelimit.TokenBucket{Name: "send_message", Rate: 10, Period: time.Minute},
		ratelimit.TokenBucket{Name: "search", Rate: 0.5, Period: time.Second},
		ratelimit.FixedWindow{Name: "send_message", Rate: -1, Period: time.Hour},
	)
	fmt.Println(err)
	// Output:
	// ratelimit: limit "search": Rate 0.5: can never grant a whole token while Capacity is left out and so is the same: set Capacity to 1 or more, or state the rate over a longer period
	// ratelimit: limit "send_message": Rate -1: must not be negative
	// ratelimit: limit "send_message": Name "send_message": is defined twice
}

// Logged, an answer is a group, without the key unless that is asked for.
func ExampleLogKeys() {
	logger := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
			if len(groups) == 0 && a.Key == slog.TimeKey { // the output is to be the same each day
				return slog.Attr{}
			}
			return a
		},
	}))
	store := memstore.New(func() time.Time { return noon })
	limit := ratelimit.TokenBucket{Name: "sign_in", Rate: 10, Period: time.Minute}

	res, err := store.Allow(context.Background(), limit.For("alice@example.com"))
	check(err)
	logger.Info("signed in", "limit", res.Request)
	logger.Info("signed in", "limit", ratelimit.LogKeys(res.Request))
	logger.Info("signed in", "", res) // inline
	// Output:
	// level=INFO msg="signed in" limit.limit=sign_in limit.count=1
	// level=INFO msg="signed in" limit.limit=sign_in limit.key=alice@example.com limit.count=1
	// level=INFO msg="signed in" limit=sign_in count=1 ok=true retry_after=0s value=9 remaining=9 capacity=10 reset_after=6s
}

// Limits from a configuration file. What is wrong in it is told by field.
func ExampleDefinition_UnmarshalJSON() {
	var limits []ratelimit.Definition
	err := json.Unmarshal([]byte(`[
		{"name": "api", "kind": "token bucket", "rate": 10, "period": "1m", "capacity": 20, "shards": 8},
		{"name": "sign_up", "kind": "fixed window", "rate": 100, "period": "24h", "maxReserved": "none",
		 "start": "2025-01-01T00:00:00+01:00"}
	]`), &limits)
	check(err)
	for _, d := range limits {
		fmt.Println(d.Limit().For("alice"))
		text, err := json.Marshal(d)
		check(err)
		fmt.Println(string(text))
	}

	var d ratelimit.Definition
	fmt.Println(json.Unmarshal([]byte(`{"name": "api", "kind": "token bucket", "rate": 10, "period": "1 minute", "burst": 5}`), &d))
	// Output:
	// 1 of "api"
	// {"name":"api","kind":"token bucket","rate":10,"period":"1m","capacity":20,"maxReserved":"unlimited","shards":8}
	// 1 of "sign_up"
	// {"name":"sign_up","kind":"fixed window","rate":100,"period":"24h","capacity":100,"maxReserved":"none","shards":1,"start":"2024-12-31T23:00:00Z"}
	// ratelimit: limit "api": period "1 minute": must be a duration such as "1m30s"
	// ratelimit: limit "api": burst 5: is no field of a definition
}

// A batch of equal jobs is one reservation, and each of them has its instant.
func ExampleResult_Instants() {
	ctx := context.Background()
	store := memstore.New(func() time.Time { return noon })
	limit := ratelimit.TokenBucket{Name: "emails", Rate: 10, Period: time.Second, Capacity: 2}

	const jobs = 5
	res, err := store.Reserve(ctx, limit.ForN("", jobs))
	check(err)
	for _, at := range res.Instants(jobs) {
		fmt.Println(at.Sub(res.At))
	}
	// Output:
	// 0s
	// 0s
	// 100ms
	// 200ms
	// 300ms
}

// Jobs of different sizes share a reservation. Each has a receipt of its own, with which
// it is settled.
func ExampleResult_Split() {
	ctx := context.Background()
	store := memstore.New(func() time.Time { return noon })
	limit := ratelimit.TokenBucket{Name: "llm_tokens", Rate: 1_000, Period: time.Second}

	res, err := store.Reserve(ctx, limit.ForN("", 3_500))
	check(err)
	jobs, err := res.Split([]float64{500}, []float64{2_000}, []float64{1_000})
	check(err)
	for _, job := range jobs {
		fmt.Println(job.Taken, "after", job.RetryAfter)
	}
	settled, err := store.Settle(ctx, jobs[1].Receipt, 1_200)
	check(err)
	fmt.Println(settled.Value)
	// Output:
	// 500 after 0s
	// 2000 after 1.5s
	// 1000 after 2.5s
	// -1700
}
