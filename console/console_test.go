package console_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"html"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/console"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/visible"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/refusals"
)

func TestMain(m *testing.M) {
	pgtest.AtOnce(4)
	pgtest.Main(m)
}

var (
	api    = ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Minute, Capacity: 20, MaxReserved: 30}
	signUp = ratelimit.FixedWindow{Name: "sign up", Rate: 100, Period: time.Hour}
	calls  = ratelimit.InFlight{Name: "calls", Limit: 2, Lease: time.Minute}
)

// site is a console on a database of the test's own, behind a server.
type site struct {
	*testing.T
	db      *pgtest.DB
	store   *pgstore.Store
	catalog *catalog.Catalog
	handler http.Handler
	url     string
	client  *http.Client // of its own: a server that is closed closes the default one's connections
}

func serve(t *testing.T, change ...func(*console.Config)) *site {
	t.Helper()
	s := &site{T: t, db: pgtest.New(t, pgtest.With(migrations.Catalog))}
	quiet := slog.New(slog.DiscardHandler)
	var err error
	s.store, err = pgstore.New(s.db.Pool, &pgstore.Config{Schema: s.db.Schema})
	s.must(err)
	s.catalog, err = catalog.New(s.db.Pool, &catalog.Config{Schema: s.db.Schema, Logger: quiet})
	s.must(err)
	s.must(s.catalog.Publish(t.Context(), api, signUp))
	s.must(s.catalog.PublishInFlight(t.Context(), calls))
	config := console.Config{Pool: s.db.Pool, Schema: s.db.Schema, Store: s.store, Catalog: s.catalog, Logger: quiet}
	for _, c := range change {
		c(&config)
	}
	s.handler, err = console.New(&config)
	s.must(err)
	server := httptest.NewServer(s.handler)
	t.Cleanup(server.Close)
	s.url, s.client = server.URL+config.Prefix, server.Client()
	s.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return s
}

func editable(c *console.Config) { c.Edit = true }

func (s *site) must(err error) {
	s.Helper()
	must(s, err)
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// exec runs statements in the site's schema.
func (s *site) exec(sql string) {
	s.Helper()
	_, err := s.db.Pool.Exec(s.Context(), "BEGIN; SET LOCAL search_path = "+s.db.Schema+"; "+sql+"; COMMIT", pgx.QueryExecModeSimpleProtocol)
	s.must(err)
}

func (s *site) edited(_ catalog.Edit, err error) {
	s.Helper()
	s.must(err)
}

// agreements are what a page asks to be agreed to, and was before.
var agreements = regexp.MustCompile(`<input type="hidden" name="agreed" value="([^"]*)">`)

// agree posts a form as often as the page asks for something, and returns the last answer and
// what was asked.
func (s *site) agree(form url.Values) (response *http.Response, page string, asked []string) {
	s.Helper()
	for range 4 {
		if response, page = s.post(form); response.StatusCode != 200 {
			break
		}
		asked = nil
		for _, found := range agreements.FindAllStringSubmatch(page, -1) {
			asked = append(asked, html.UnescapeString(found[1]))
		}
		form["agreed"] = asked
		if until := regexp.MustCompile(`name="until" value="([^"]*)"`).FindStringSubmatch(page); until != nil {
			form.Set("until", html.UnescapeString(until[1]))
		}
	}
	return response, page, asked
}

// do sends a request, and follows no redirect.
func (s *site) do(request *http.Request) (response *http.Response, body string) {
	s.Helper()
	response, err := s.client.Do(request)
	s.must(err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	s.must(err)
	return response, string(text)
}

// send sends a request after a change of it.
func (s *site) send(method, path, body string, change func(*http.Request)) (*http.Response, string) {
	s.Helper()
	request, err := http.NewRequestWithContext(s.Context(), method, s.url+path, strings.NewReader(body))
	s.must(err)
	if method == http.MethodPost {
		request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	if change != nil {
		change(request)
	}
	return s.do(request)
}

// values are pairs of names and values.
func values(pairs ...string) url.Values {
	v := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		v.Set(pairs[i], pairs[i+1])
	}
	return v
}

// get returns a page, which must have a status.
func (s *site) get(status int, path string, query ...string) string {
	s.Helper()
	response, body := s.send(http.MethodGet, path+"?"+values(query...).Encode(), "", nil)
	if response.StatusCode != status {
		s.Fatalf("GET %s: got %s, want %d:\n%s", path, response.Status, status, body)
	}
	return body
}

// post posts a form as the page of the site does.
func (s *site) post(form url.Values, header ...string) (*http.Response, string) {
	s.Helper()
	return s.send(http.MethodPost, "/change", form.Encode(), func(r *http.Request) {
		for i := 0; i < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
	})
}

func (s *site) wants(page string, texts ...string) {
	s.Helper()
	for _, text := range texts {
		if !strings.Contains(page, text) && !strings.Contains(html.UnescapeString(page), text) {
			s.Errorf("the page lacks %q:\n%s", text, page)
		}
	}
}

func (s *site) take(n float64, key string) {
	s.Helper()
	result, err := s.store.Reserve(s.Context(), api.ForN(key, n))
	if err != nil || !result.OK {
		s.Fatalf("reserve: %v, %v", result, err)
	}
}

func TestPagesTellWhatIsThere(t *testing.T) {
	t.Parallel()
	s := serve(t)
	s.take(25, "alice")
	s.take(5, "bob")
	_, err := s.store.Pause(t.Context(), api, "carol", time.Hour)
	s.must(err)
	s.edited(s.catalog.Set(t.Context(), "api", "bob", catalog.Override{Capacity: 40, Note: "moving house"}))

	s.wants(s.get(200, "/"), "api", api.Definition().String(), "sign up", signUp.Definition().String(), `<td class="n" data-label="rows">3`)
	s.wants(s.get(200, "/limit", "name", "api"), "alice", "in debt", "bob", "overridden", "carol", "paused until", "capacity 40, (moving house)")
	if page := s.get(200, "/limit", "name", "api", "prefix", "a"); !strings.Contains(page, "alice") || strings.Contains(page, "carol") {
		t.Errorf("by a prefix: %s", page)
	}
	short := s.get(200, "/limit", "name", "api", "short", "yes")
	if s.wants(short, "alice", "carol", "3 keys were looked at"); strings.Contains(short, "key=bob\"") && strings.Count(short, ">bob<") > 1 {
		t.Errorf("bob is not limited: %s", short)
	}
	s.wants(s.get(200, "/key", "name", "api", "key", "alice"), "refused: 1 wanted, -", "would be granted at", `<img class="chart" src="data:image/svg+xml;base64,`, `alt="Tokens from now`)
	s.wants(s.get(200, "/key", "name", "api", "key", "alice", "count", "2", "reserve", "yes"), "a reservation of 2 would be due at")
	s.wants(s.get(200, "/key", "name", "api", "key", "carol"), "refused: it is paused until")
	s.wants(s.get(200, "/key", "name", "api", "key", "dora"), "granted: 1 would be taken of 20", "which means that it is full")
	s.wants(s.get(200, "/key", "name", "api", "key", "dora", "count", "21"), "never: ")
	s.wants(s.get(200, "/changes"), "moving house", "bob", "api")
	s.wants(s.get(200, "/style.css"), "prefers-color-scheme: dark")
}

// The pages of many keys together show each of them once.
func TestPagesOfKeys(t *testing.T) {
	t.Parallel()
	s := serve(t)
	s.exec(`INSERT INTO rate_limits (name, key, shard, value, ts)
		SELECT 'api', 'key ' || lpad(n::text, 3, '0'), 0, n % 2, clock_timestamp() FROM generate_series(1, 120) AS n`)
	link, next := regexp.MustCompile(`<a href="([^"]*)">(key \d+)</a>`), regexp.MustCompile(`<a href="([^"]*)">Next keys`)
	for _, short := range []string{"", "yes"} {
		seen, pages := map[string]bool{}, 0
		query := []string{"name", "api", "short", short}
		for pages < 10 {
			page := s.get(200, "/limit", query...)
			pages++
			for _, found := range link.FindAllStringSubmatch(page, -1) {
				if seen[found[2]] {
					t.Errorf("%q is there twice", found[2])
				}
				seen[found[2]] = true
			}
			more := next.FindStringSubmatch(page)
			if more == nil {
				break
			}
			there, err := url.Parse(html.UnescapeString(more[1]))
			s.must(err)
			query = append(query[:4:4], "after", there.Query().Get("after"))
		}
		if want := map[string]int{"": 120, "yes": 60}[short]; len(seen) != want || pages < 2 {
			t.Errorf("short %q: got %d keys on %d pages, want %d", short, len(seen), pages, want)
		}
	}
}

func TestChanges(t *testing.T) {
	t.Parallel()
	s := serve(t, editable)
	s.take(20, "alice")
	value := func() ratelimit.Status {
		t.Helper()
		result, err := s.store.Check(t.Context(), s.catalog.ForN(api, "alice", 0))
		s.must(err)
		return result.Status
	}
	// change makes a change, which does nothing before all that it asks is agreed to.
	change := func(does string, fields ...string) {
		t.Helper()
		form := values(append([]string{"name", "api", "key", "alice"}, fields...)...)
		before := value()
		response, page := s.post(form)
		if response.StatusCode != 200 || !strings.Contains(html.UnescapeString(page), does) {
			t.Fatalf("%v: got %s, want %q:\n%s", fields, response.Status, does, page)
		}
		if after := value(); after.Value > before.Value+1 || after.Capacity != before.Capacity || after.PausedUntil != before.PausedUntil {
			t.Fatalf("%v: got %v before it was confirmed, want %v", fields, after, before)
		}
		response, page, _ = s.agree(form)
		if response.StatusCode != http.StatusSeeOther {
			t.Fatalf("%v, confirmed: got %s:\n%s", fields, response.Status, page)
		}
		there, err := response.Location()
		s.must(err)
		if there.Path != "/key" && form.Get("all") == "" || there.Query().Get("name") != "api" {
			t.Errorf("%v: sent to %v", fields, there)
		}
	}
	change("Give 5 to alice of api", "action", "credit", "tokens", "5")
	if v := value().Value; v < 5 || v > 6 {
		t.Errorf("credit: got %v, want 5 and what came in", v)
	}
	change("Empty alice of api, and let nothing through for 1h", "action", "pause", "for", "1h")
	if v := value(); v.Value != 0 || v.PausedUntil.IsZero() {
		t.Errorf("pause: got %v", v)
	}
	change("End the pause of alice of api", "action", "resume")
	if v := value(); !v.PausedUntil.IsZero() {
		t.Errorf("resume: got %v", v)
	}
	change("Change the override of alice of api: none → rate 100, capacity 200, (moving house)", "action", "set", "rate", "100", "capacity", "200", "note", "moving house")
	if v := value(); v.Capacity != 200 {
		t.Errorf("set: got %v", v)
	}
	change("Fill alice of api up", "action", "reset")
	if v := value(); v.Value != 200 {
		t.Errorf("reset: got %v", v)
	}
	change("rate 100, capacity 200, (moving house) → rate 100, capacity 200, mode refuse, (moving house)", "action", "set", "mode", "refuse")
	s.wants(s.get(200, "/key", "name", "api", "key", "alice"), "refused: its mode is refuse, until that is changed", `<option selected>refuse</option>`, `value="200"`)
	change("→ rate 100, capacity 20, mode shadow", "action", "set", "mode", "shadow", "was_note", "moving house", "note", "", "was_rate", "100", "rate", "100", "was_capacity", "200", "capacity", "20")
	s.take(20, "alice")
	s.wants(s.get(200, "/key", "name", "api", "key", "alice"), "granted, since its mode is shadow: 1 wanted, 0")
	change("→ rate 100, capacity 20, mode shadow, off", "action", "off")
	change("mode shadow, off → rate 100, capacity 20, mode shadow", "action", "on")
	change("Change the override of alice of api: rate 100, capacity 20, mode shadow → none", "action", "unset")
	if v := value(); v.Capacity != 20 {
		t.Errorf("unset: got %v", v)
	}
	change("Change the override of all keys of api: none → capacity 50, max reserved unlimited", "action", "set", "all", "yes", "capacity", "50", "max-reserved", "unlimited")
	if v := value(); v.Capacity != 50 {
		t.Errorf("set for all: got %v", v)
	}
	change("capacity 50, max reserved unlimited → none", "action", "unset", "all", "yes")
	if v := value(); v.Capacity != 20 {
		t.Errorf("unset for all: got %v", v)
	}
}

// A form's edit is what somebody has changed in it: what others have changed since it was shown
// stays.
func TestFormsNameWhatWasChanged(t *testing.T) {
	t.Parallel()
	s := serve(t, editable)
	s.edited(s.catalog.Set(t.Context(), "api", "alice", catalog.Override{Rate: 100, Capacity: 200}))
	form := url.Values{
		"name": {"api"}, "key": {"alice"}, "action": {"set"}, // as it was shown
		"was_rate": {"100"}, "rate": {"100"}, "was_capacity": {"200"}, "capacity": {""}, "was_until": {""}, "until": {"48h"}, "was_period": {""}, "period": {""},
	}
	s.edited(s.catalog.Set(t.Context(), "api", "alice", catalog.Override{Rate: 300, Note: "another tab"}))
	response, page, asked := s.agree(form)
	if response.StatusCode != http.StatusSeeOther || len(asked) != 1 {
		t.Fatalf("got %s, asked %q:\n%s", response.Status, asked, page)
	}
	s.must(s.catalog.Refresh(t.Context()))
	got, _ := s.catalog.Override("api", "alice")
	left := time.Until(got.Until)
	if got.Until = (time.Time{}); got.Override != (catalog.Override{Rate: 300, Note: "another tab", Switch: catalog.On}) || left < 47*time.Hour || left > 48*time.Hour {
		t.Errorf("got %+v, for %v", got.Override, left)
	}
}

// What was agreed to is what is done: if the override is another by then, the page asks anew.
func TestAgreedToSomethingElse(t *testing.T) {
	t.Parallel()
	s := serve(t, editable)
	form := url.Values{"name": {"api"}, "key": {"alice"}, "action": {"set"}, "rate": {"50"}, "agreed": {"Change the override of alice of api: none → rate 50"}}
	s.edited(s.catalog.Set(t.Context(), "api", "alice", catalog.Override{Capacity: 100}))
	response, page := s.post(form)
	if s.wants(page, "It has been changed meanwhile", "capacity 100 → rate 50, capacity 100"); response.StatusCode != 200 {
		t.Errorf("got %s", response.Status)
	}
	s.must(s.catalog.Refresh(t.Context()))
	if got, _ := s.catalog.Override("api", "alice"); got.Rate != 0 {
		t.Errorf("it was done: %+v", got)
	}
}

// What grants less than the program has published is asked for once more, and an edit for all keys
// says how many it concerns, and how many would be refused.
func TestLowerIsAskedAgain(t *testing.T) {
	t.Parallel()
	s := serve(t, editable)
	s.take(15, "alice")
	s.take(16, "bob")
	s.take(1, "carol")
	s.take(1, "own")
	s.edited(s.catalog.Set(t.Context(), "api", "own", catalog.Override{Capacity: 40}))
	form := url.Values{"name": {"api"}, "all": {"yes"}, "action": {"set"}, "mode": {"refuse"}}
	_, page := s.post(form)
	s.wants(page, "it concerns 4 keys that have rows, of which 4 would be refused now")
	_, _, asked := s.agree(form)
	if len(asked) != 2 || asked[1] != "Go on although it grants less than the program has published, by its Mode" {
		t.Errorf("asked %q", asked)
	}
	_, page = s.post(url.Values{"name": {"api"}, "all": {"yes"}, "action": {"set"}, "mode": {"enforce"}, "capacity": {"0.5"}, "max-reserved": {"5"}})
	s.wants(page, "it concerns 4 keys that have rows, of which 3 would be refused now")
	_, _, asked = s.agree(url.Values{"name": {"api"}, "all": {"yes"}, "action": {"set"}, "mode": {"enforce"}, "capacity": {"100"}})
	if len(asked) != 1 {
		t.Errorf("asked %q", asked)
	}
}

func TestPermits(t *testing.T) {
	t.Parallel()
	s := serve(t, editable)
	held, err := s.store.Permits().Acquire(t.Context(), calls.For("org <7>"))
	if err != nil || !held.OK {
		t.Fatal(held, err)
	}
	s.wants(s.get(200, "/"), `href="/permits?name=calls"`)
	s.wants(s.get(200, "/permits", "name", "calls"), "org <7>", `<td class="n" data-label="held">1`, fmt.Sprintf("permit %d, fence %d, until", held.Number, held.Fence))
	form := url.Values{"name": {"calls"}, "key": {"org <7>"}, "action": {"free"}}
	response, page := s.post(form)
	if response.StatusCode != 200 || !strings.Contains(html.UnescapeString(page), "Free all permits of org <7> of calls") {
		t.Errorf("got %s:\n%s", response.Status, page)
	}
	if _, err := s.store.Permits().Renew(t.Context(), held); err != nil {
		t.Errorf("before it was confirmed: %v", err)
	}
	if response, page, _ = s.agree(form); response.StatusCode != http.StatusSeeOther || !strings.HasPrefix(response.Header.Get("Location"), "/permits?") {
		t.Errorf("got %s:\n%s", response.Status, page)
	}
	if _, err := s.store.Permits().Renew(t.Context(), held); !errors.Is(err, ratelimit.ErrLeaseLost) {
		t.Errorf("after it was confirmed: %v", err)
	}
	for _, test := range []struct {
		want   string
		fields url.Values
	}{
		{"3 at once, lease 2m", url.Values{"key": {"org <7>"}, "action": {"set"}, "at-once": {"3"}, "lease": {"2m"}}},
		{"5 at once", url.Values{"all": {"yes"}, "action": {"set"}, "at-once": {"5"}}},
	} {
		test.fields.Set("name", "calls")
		if response, page, _ := s.agree(test.fields); response.StatusCode != http.StatusSeeOther {
			t.Errorf("%v: got %s:\n%s", test.fields, response.Status, page)
		}
		s.wants(s.get(200, "/permits", "name", "calls"), test.want)
	}
	s.wants(s.get(200, "/permits", "name", "calls", "key", "org <7>"), "Override org &lt;7&gt;", `name="at-once" value="3"`, `placeholder="2"`)
	for _, action := range []string{"reset", "credit", "pause", "resume"} {
		if response, page := s.post(url.Values{"name": {"calls"}, "key": {"org"}, "action": {action}, "tokens": {"1"}, "for": {"1h"}}); response.StatusCode != http.StatusBadRequest {
			t.Errorf("%s of permits: got %s:\n%s", action, response.Status, page)
		}
	}
	if response, page := s.post(url.Values{"name": {"api"}, "key": {"alice"}, "action": {"free"}}); response.StatusCode != http.StatusBadRequest {
		t.Errorf("permits of a rate: got %s:\n%s", response.Status, page)
	}
	s.get(404, "/permits", "name", "api")
}

func TestRefused(t *testing.T) {
	t.Parallel()
	s := serve(t)
	s.wants(s.get(200, "/refused"), "The table of refusals is not there")

	db := pgtest.New(t, pgtest.With(migrations.Refusals))
	recorder, err := refusals.New(db.Pool, &refusals.Config{Schema: db.Schema})
	s.must(err)
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema, Observe: recorder.Observe})
	s.must(err)
	memory, err := catalog.NewInMemory(nil)
	s.must(err)
	s.must(memory.Publish(t.Context(), api))
	for range 3 {
		if _, err := store.Allow(t.Context(), api.ForN("<alice>", 20)); err != nil {
			t.Fatal(err)
		}
	}
	s.must(recorder.Write(t.Context()))
	handler, err := console.New(&console.Config{Pool: db.Pool, Schema: db.Schema, Store: store, Catalog: memory})
	s.must(err)
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	s.url = server.URL
	s.wants(s.get(200, "/refused", "limit", "api", "since", "5m"), "<alice>", `<td class="n" data-label="refused">2`, `href="/key?name=api&amp;key=%3calice%3e"`)
	s.wants(s.get(200, "/refused", "limit", "other"), "No key was refused by other in that time")
	s.wants(s.get(200, "/changes"), "Nothing has been changed") // but a file was read
	s.get(400, "/refused", "since", "long")
	s.get(400, "/refused", "since", "48h")
}

// The page offers no mode that a limit cannot have, and tells of a key that is none of the limit's.
func TestWhatThePageOffers(t *testing.T) {
	t.Parallel()
	s := serve(t, editable)
	s.must(s.catalog.PublishInFlight(t.Context(), ratelimit.InFlight{Name: "at once", Limit: 2}))
	shadow := regexp.MustCompile(`<option[^>]*>shadow`)
	for path, offered := range map[string]bool{"/key?name=api&key=alice": true, "/limit?name=api": true, "/permits?name=at+once": false, "/permits?name=at+once&key=alice": false} {
		if _, page := s.send(http.MethodGet, path, "", nil); !strings.Contains(page, "enforce") || shadow.MatchString(page) != offered {
			t.Errorf("%s: offers shadow: %t, want %t", path, !offered, offered)
		}
	}
	response, page := s.post(url.Values{"name": {"at once"}, "key": {"alice"}, "action": {"set"}, "mode": {"shadow"}})
	if response.StatusCode != 400 || !strings.Contains(page, "must be enforce or refuse for a limit of how many at once") {
		t.Errorf("got %s:\n%s", response.Status, page)
	}
	s.must(s.store.Take(t.Context(), api.For("198.51.100.7/32")))
	s.wants(s.get(200, "/key", "name", "api", "key", "192.0.2.1"), "such as 198.51.100.7/32 (IPv4/32), and this is another shape (address): write 192.0.2.1/32.")
	if page := s.get(200, "/key", "name", "api", "key", "192.0.2.1/32"); strings.Contains(page, "another shape") {
		t.Error("a key of the limit's is said to be none")
	}
	if _, err := s.store.Permits().Acquire(t.Context(), ratelimit.InFlight{Name: "at once", Limit: 2}.For("198.51.100.7/32")); err != nil {
		t.Fatal(err)
	}
	s.wants(s.get(200, "/permits", "name", "at once", "key", "192.0.2.1"), "such as 198.51.100.7/32 (IPv4/32), and this is another shape (address): write 192.0.2.1/32.")
	if page := s.get(200, "/permits", "name", "at once", "key", "192.0.2.1/32"); strings.Contains(page, "another shape") {
		t.Error("a key of the limit of how many at once is said to be none")
	}
}

// Bad input is answered with what is wrong with it, and changes nothing.
func TestBadChanges(t *testing.T) {
	t.Parallel()
	s := serve(t, editable)
	for _, test := range []struct {
		status int
		want   string
		fields []string
	}{
		{400, "action &#34;explode&#34;", []string{"action", "explode"}},
		{400, "action &#34;reset&#34;", []string{"action", "reset", "all", "yes"}},
		{400, "tokens &#34;many&#34;: must be a number", []string{"action", "credit", "tokens", "many"}},
		{400, "tokens -1: must be positive", []string{"action", "credit", "tokens", "-1"}},
		{400, "for &#34;&#34;: must be a duration", []string{"action", "pause"}},
		{400, "for -1h0m0s: must be positive", []string{"action", "pause", "for", "-1h"}},
		{400, "rate &#34;fast&#34;", []string{"action", "set", "rate", "fast"}},
		{400, "<p class=\"no\">ratelimit: limit &#34;api&#34;: Rate -1: must not be negative</p>\n", []string{"action", "set", "rate", "-1"}},
		{400, "must be enforce, shadow or refuse", []string{"action", "set", "mode", "on"}},
		{400, "period &#34;month&#34;", []string{"action", "set", "period", "month"}},
		{400, "rate &#34;0&#34;: must not be 0", []string{"action", "set", "rate", "0", "note", "n"}},
		{400, "is over", []string{"action", "set", "rate", "50", "until", "-5m"}},
		{400, "names no field", []string{"action", "set"}},
		{400, "there is none to turn on or off", []string{"action", "off"}},
		{400, "is so already", []string{"action", "unset"}},
		{400, "Key", []string{"action", "set", "rate", "5", "key", strings.Repeat("k", 3000)}},
		{400, "key", []string{"action", "set", "rate", "5", "key", catalog.AllKeys}},
		{404, "no definition of this limit", []string{"action", "reset", "name", "nothing"}},
	} {
		response, page := s.post(values(append([]string{"name", "api", "key", "alice"}, test.fields...)...))
		if response.StatusCode != test.status || !strings.Contains(page, test.want) {
			t.Errorf("%v: got %s, want %d and %q:\n%s", test.fields, response.Status, test.status, test.want, page)
		}
	}
	response, _ := s.post(url.Values{"name": {"api"}, "key": {strings.Repeat("k", 70_000)}, "action": {"reset"}})
	if response.StatusCode != 400 {
		t.Errorf("a large form: got %s", response.Status)
	}
	if changes, err := s.catalog.History(t.Context(), "api", 0); err != nil || len(changes) != 1 {
		t.Errorf("got %d changes of the catalog, %v; want its publishing only", len(changes), err)
	}
	for _, query := range [][]string{{"count", "many"}, {"count", "NaN"}, {"key", "a\x00b"}, {"key", "\xff"}, {"key", strings.Repeat("k", 3000)}} {
		s.get(400, "/key", append([]string{"name", "api", "key", "alice"}, query...)...)
	}
	s.get(404, "/limit", "name", "nothing")
	s.get(404, "/key", "name", "nothing", "key", "alice")
	s.get(404, "/nothing")
}

// Without Edit the page offers no change and makes none.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	s := serve(t)
	s.take(20, "alice")
	for _, page := range []string{s.get(200, "/limit", "name", "api"), s.get(200, "/key", "name", "api", "key", "alice")} {
		if strings.Contains(page, "/change\"") {
			t.Errorf("the page offers a change:\n%s", page)
		}
	}
	response, page := s.post(url.Values{"name": {"api"}, "key": {"alice"}, "action": {"reset"}, "agreed": {"Fill alice of api up, and forget its pause and its debt"}})
	if response.StatusCode != http.StatusForbidden || !strings.Contains(page, "not allowed here") {
		t.Errorf("got %s:\n%s", response.Status, page)
	}
	if result, err := s.store.Check(t.Context(), api.ForN("alice", 0)); err != nil || result.Value > 1 {
		t.Errorf("got %v, %v; want it left alone", result, err)
	}
}

// A page of another site can neither post for somebody who has the page open nor frame it.
func TestOtherSites(t *testing.T) {
	t.Parallel()
	s := serve(t, editable)
	form := url.Values{"name": {"api"}, "key": {"alice"}, "action": {"pause"}, "for": {"1h"}, "agreed": {"Empty alice of api, and let nothing through for 1h"}}
	for _, header := range [][]string{
		{"Sec-Fetch-Site", "cross-site"},
		{"Sec-Fetch-Site", "same-site"},
		{"Origin", "https://evil.example"},
		{"Origin", "null"},
	} {
		if response, _ := s.post(form, header...); response.StatusCode != http.StatusForbidden {
			t.Errorf("%v: got %s, want 403", header, response.Status)
		}
	}
	if result, err := s.store.Check(t.Context(), api.For("alice")); err != nil || !result.OK {
		t.Errorf("got %v, %v; want nothing changed", result, err)
	}
	if response, _ := s.send(http.MethodGet, "/change?action=reset&name=api&key=alice&confirmed=yes", "", nil); response.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("a change by GET: got %s", response.Status)
	}
	response, _ := s.send(http.MethodGet, "/", "", nil)
	if policy := response.Header.Get("Content-Security-Policy"); !strings.Contains(policy, "frame-ancestors 'none'") ||
		!strings.Contains(policy, "default-src 'none'") || strings.Contains(policy, "unsafe") || response.Header.Get("X-Frame-Options") != "DENY" {
		t.Errorf("got headers %v", response.Header)
	}
}

var inputs = regexp.MustCompile(`<input type="hidden" name="\w+" value="[^"]*">`)

// Keys that strangers have chosen are shown as texts.
func TestHostileKeys(t *testing.T) {
	t.Parallel()
	s := serve(t, editable)
	for _, key := range []string{
		`<script>alert(1)</script>`, `"><img src=x onerror=alert(1)>`, `javascript:alert(1)`, `{{.}}`, "\x1b[31mred", "a\u202eb",
		"&name=other#x", strings.Repeat("<b>", 600), " ", "", "a\nb",
	} {
		s.take(1, key)
		s.edited(s.catalog.Set(t.Context(), "api", key, catalog.Override{Rate: 5, Note: key}))
		for _, page := range []string{
			s.get(200, "/limit", "name", "api"),
			s.get(200, "/key", "name", "api", "key", key),
			s.get(200, "/changes", "done", key),
		} {
			page = inputs.ReplaceAllString(page, "") // which nobody sees, and are posted as they are
			for _, bad := range []string{"<script", "<img src=x", "<b>", "\x1b", "\u202e", `href="javascript`} {
				if strings.Contains(page, bad) {
					t.Errorf("key %q: the page has %q", key, bad)
				}
			}
		}
		form := url.Values{"name": {"api"}, "key": {visible.Text(key)}, "action": {"unset"}}
		if response, page := s.post(form); response.StatusCode != 200 || strings.Contains(page, "<script") || strings.Contains(page, "<img src=x") {
			t.Errorf("key %q: got %s:\n%s", key, response.Status, page)
		}
		response, _, _ := s.agree(form)
		there, err := response.Location()
		s.must(err)
		if there.Host != strings.TrimPrefix(s.url, "http://") || there.Query().Get("key") != key {
			t.Errorf("key %q: sent to %v", key, there)
		}
	}
	if overrides := s.catalog.Overrides("api"); len(overrides) != 0 {
		t.Errorf("got overrides %v, want each removed", overrides)
	}
}

func TestToken(t *testing.T) {
	t.Parallel()
	s := serve(t, func(c *console.Config) { c.Token = "secret"; c.Prefix = "/admin/limits" })
	for _, test := range []struct {
		password string
		status   int
	}{{"", 401}, {"secre", 401}, {"secret2", 401}, {"secret", 200}} {
		for _, path := range []string{"/", "/style.css"} {
			response, body := s.send(http.MethodGet, path, "", func(r *http.Request) {
				if test.password != "" {
					r.SetBasicAuth("anybody", test.password)
				}
			})
			if response.StatusCode != test.status || test.status == 401 && response.Header.Get("WWW-Authenticate") == "" {
				t.Errorf("%s with %q: got %s", path, test.password, response.Status)
			}
			if test.status == 200 && path == "/" {
				s.wants(body, `href="/admin/limits/style.css"`, `href="/admin/limits/limit?name=sign%20up"`)
			}
		}
	}
}

// Every page answers 200, 400 or 404 to whatever stands in its address.
func TestBadAddresses(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	s := serve(t)
	s.take(1, "alice")
	for _, path := range []string{"/", "/limit", "/key", "/permits", "/refused", "/changes"} {
		for _, name := range []string{"api", "calls", "none"} {
			for _, parameter := range []string{"name", "key", "prefix", "after", "count", "reserve", "short", "limit", "since", "refresh", "done", "other"} {
				for _, value := range []string{"", "a\x00b", "\xff", catalog.AllKeys, strings.Repeat("k", 3000), "1e308", "-1", "1e-300", "NaN", "-1h", "1ns", "2562047h", "\u202e", "%"} {
					query := url.Values{"name": {name}, "key": {"alice"}}
					query.Set(parameter, value)
					if response, page := s.send(http.MethodGet, path+"?"+query.Encode(), "", nil); response.StatusCode != 200 && response.StatusCode != 400 && response.StatusCode != 404 {
						t.Errorf("%s with %s %q: got %s:\n%s", path, parameter, value, response.Status, page)
					}
				}
			}
		}
		for _, query := range []string{"%zz", "name=%zz", "a;b"} {
			if response, _ := s.send(http.MethodGet, path+"?"+query, "", nil); response.StatusCode != 400 {
				t.Errorf("%s?%s: got %s, want 400", path, query, response.Status)
			}
		}
	}
}

// A name that a stranger has given this server's address is none of ours, wherever the page is
// served.
func TestHosts(t *testing.T) {
	t.Parallel()
	names := map[string]int{
		"": 200, "localhost": 200, "LOCALHOST:8428": 200, "127.0.0.1": 200, "[::1]:80": 200, "[::1]": 200, "10.0.0.7:80": 200,
		"limits.example.com": 200, "Limits.Example.com:443": 200, "evil.example": 421, "evil.example:80": 421, "localhost.evil.example": 421, "127.0.0.1.evil.example": 421,
	}
	s := serve(t, editable, func(c *console.Config) { c.Hosts = []string{"limits.example.com"} })
	guarded := serve(t, func(c *console.Config) { c.Token = "secret" })
	for host, want := range names {
		for _, method := range []string{http.MethodGet, http.MethodPost} {
			path, status := "/", want
			if method == http.MethodPost {
				path = "/change"
				if want == 200 {
					status = 404 // of no limit
				}
			}
			if response, page := s.send(method, path, "", func(r *http.Request) { r.Host = host }); response.StatusCode != status {
				t.Errorf("%s as %q: got %s, want %d:\n%s", method, host, response.Status, status, page)
			}
		}
		if response, _ := guarded.send(http.MethodGet, "", "", func(r *http.Request) {
			r.Host = host
			r.SetBasicAuth("", "secret") // which browsers give to no other name
		}); response.StatusCode != 200 {
			t.Errorf("with a token, as %q: got %s", host, response.Status)
		}
	}
}

// A database that is not as it should be is told, and the pages go on.
func TestFaults(t *testing.T) {
	t.Parallel()
	t.Run("no table", func(t *testing.T) {
		s := serve(t)
		s.exec("DROP TABLE rate_limits CASCADE")
		s.wants(s.get(503, "/"), "The database did not answer as it should")
	})
	t.Run("no catalog", func(t *testing.T) {
		s := serve(t)
		s.take(1, "alice")
		s.exec("DROP TABLE rate_limit_definitions CASCADE")
		s.get(200, "/")
	})
	t.Run("no views", func(t *testing.T) {
		s := serve(t)
		s.take(20, "alice")
		s.exec("DROP FUNCTION rate_limits_at CASCADE")
		if page := s.get(200, "/key", "name", "api", "key", "alice"); strings.Contains(page, "data:image/svg") {
			t.Errorf("got a picture:\n%s", page)
		}
	})
	t.Run("no database", func(t *testing.T) {
		s := serve(t)
		s.db.Pool.Close()
		s.get(503, "/")
	})
	t.Run("a client that has gone", func(t *testing.T) {
		s := serve(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		w := httptest.NewRecorder()
		s.handler.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "http://localhost/", nil))
		if w.Code != http.StatusServiceUnavailable {
			t.Errorf("got %d", w.Code)
		}
	})
}

// The history and the log have who makes a change: whom the program names, or whom the browser does.
func TestWho(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*console.Config){
		"ann": func(c *console.Config) { c.Who = func(r *http.Request) string { return r.Header.Get("X-User") } },
		"bob": func(c *console.Config) { c.Token = "secret" },
	} {
		var log bytes.Buffer
		s := serve(t, editable, change, func(c *console.Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
		form := url.Values{"name": {"api"}, "key": {"k"}, "action": {"set"}, "rate": {"100"}, "capacity": {"200"}}
		var response *http.Response
		for range 2 { // it asks, and makes the change
			var page string
			response, page = s.send(http.MethodPost, "/change", form.Encode(), func(r *http.Request) {
				r.Header.Set("X-User", "ann")
				r.SetBasicAuth("bob", "secret")
			})
			for _, found := range agreements.FindAllStringSubmatch(page, -1) {
				form["agreed"] = []string{html.UnescapeString(found[1])}
			}
		}
		if response.StatusCode != http.StatusSeeOther {
			t.Fatalf("got %s, want the change to be made", response.Status)
		}
		changes, err := s.catalog.History(t.Context(), "api", 1)
		s.must(err)
		if changes[0].Who != name || changes[0].Role == "" || !strings.Contains(log.String(), "who="+name) {
			t.Errorf("got %+v and the log %s, want %s", changes[0], &log, name)
		}
		if name == "ann" { // without a token
			s.wants(s.get(200, "/changes"), "ann ("+changes[0].Role+")")
		}
	}
}

func TestNew(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store, err := pgstore.New(db.Pool, nil)
	must(t, err)
	memory, err := catalog.NewInMemory(nil)
	must(t, err)
	whole := console.Config{Pool: db.Pool, Store: store, Catalog: memory}
	for field, change := range map[string]func(*console.Config){
		"Pool":       func(c *console.Config) { c.Pool = nil },
		"Store":      func(c *console.Config) { c.Store = nil },
		"Catalog":    func(c *console.Config) { c.Catalog = nil },
		"Prefix":     func(c *console.Config) { c.Prefix = "limits" },
		"Prefix /":   func(c *console.Config) { c.Prefix = "/limits/" },
		"Prefix { ":  func(c *console.Config) { c.Prefix = "/{limits}" },
		"Prefix GET": func(c *console.Config) { c.Prefix = "/a b" },
		"Timeout":    func(c *console.Config) { c.Timeout = -1 },
		"Hosts :":    func(c *console.Config) { c.Hosts = []string{"limits.example.com:80"} },
		"Hosts":      func(c *console.Config) { c.Hosts = []string{""} },
	} {
		config := whole
		change(&config)
		var fault *ratelimit.FieldError
		named, _, _ := strings.Cut(field, " ")
		if _, err := console.New(&config); !errors.As(err, &fault) || fault.Field != named || !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: got %v", field, err)
		}
	}
	if _, err := console.New(nil); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("nil: got %v", err)
	}
	if _, err := console.New(&whole); err != nil {
		t.Error(err)
	}
}

// A raise is told before it is agreed to, and what was used stays used, unless the box is ticked.
func TestEditsKeepWhatWasUsed(t *testing.T) {
	t.Parallel()
	s := serve(t, editable, func(c *console.Config) {
		var err error
		c.Catalog, err = catalog.New(c.Pool, &catalog.Config{Schema: c.Schema, Store: c.Store, Logger: c.Logger})
		if err != nil {
			t.Fatal(err)
		}
	})
	d := signUp.Definition()
	s.must(s.store.Take(t.Context(), signUp.ForN("alice", d.Capacity-5)))
	left := func(want float64) {
		t.Helper()
		s.must(s.catalog.Refresh(t.Context()))
		statuses, err := s.store.CheckEach(t.Context(), s.catalog.ForN(signUp, "alice", 0))
		s.must(err)
		if statuses[0].Value != want {
			t.Errorf("%v left, want %v", statuses[0].Value, want)
		}
	}
	cut := url.Values{"name": {d.Name}, "key": {"alice"}, "action": {"set"}, "rate": {fmt.Sprint(d.Rate - 2)}}
	_, page := s.post(cut)
	s.wants(page, fmt.Sprintf("alice: 5 left of %v → 3 left of %v.", d.Rate, d.Rate-2))
	s.agree(cut)
	left(3)
	asIs := url.Values{"name": {d.Name}, "key": {"alice"}, "action": {"set"}, "rate": {fmt.Sprint(d.Rate - 3)}, "as_is": {"yes"}}
	_, page = s.post(asIs)
	s.wants(page, "and leave what is left as it is")
	s.agree(asIs)
	left(3)
}
