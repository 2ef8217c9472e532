package browser

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/console"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/refusals"
)

var pictures = flag.String("pictures", "", "a directory to write pictures of all pages to, in three widths and two palettes")

func TestMain(m *testing.M) { pgtest.Main(m) }

var (
	api     = ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Minute, Capacity: 20, MaxReserved: 30}
	monthly = ratelimit.FixedWindow{Name: "documents per month and customer", Rate: 1_000_000, Every: ratelimit.Month, Zone: "Europe/Berlin"}
	strict  = ratelimit.SlidingWindow{Name: "strict", Rate: 100, Period: time.Hour, Slots: 60}
	exports = ratelimit.InFlight{Name: "exports", Limit: 3, Lease: time.Minute}
	long    = ratelimit.TokenBucket{Name: "a_limit_" + strings.Repeat("without_a_place_to_break_its_name_", 3), Rate: 1, Period: time.Minute}
)

// site is the page on a database of the test's own, which may be changed.
type site struct {
	*testing.T
	db       *pgtest.DB
	store    *pgstore.Store
	catalog  *catalog.Catalog
	refusals *refusals.Recorder
	url      string
}

func serve(t *testing.T) *site {
	t.Helper()
	db := pgtest.New(t, pgtest.With(migrations.Catalog), pgtest.With(migrations.Refusals))
	quiet := slog.New(slog.DiscardHandler)
	s := &site{T: t, db: db}
	var err error
	s.refusals, err = refusals.New(db.Pool, &refusals.Config{Schema: db.Schema})
	s.must(err)
	s.store, err = pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema, Observe: s.refusals.Observe})
	s.must(err)
	s.catalog, err = catalog.New(db.Pool, &catalog.Config{Schema: db.Schema, Logger: quiet})
	s.must(err)
	s.must(s.catalog.Publish(t.Context(), api, monthly, strict, long))
	s.must(s.catalog.PublishInFlight(t.Context(), exports))
	handler, err := console.New(&console.Config{Pool: db.Pool, Schema: db.Schema, Store: s.store, Catalog: s.catalog, Edit: true, Logger: quiet})
	s.must(err)
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	s.url = server.URL
	return s
}

func (s *site) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *site) edited(_ catalog.Edit, err error) {
	s.Helper()
	s.must(err)
}

func (s *site) take(n float64, key string) {
	s.Helper()
	result, err := s.store.Reserve(s.Context(), api.ForN(key, n))
	if err != nil || !result.OK {
		s.Fatalf("reserve: %v, %v", result, err)
	}
}

// browse returns a tab of a browser of the test's own. Without a browser the test is left out.
func browse(t *testing.T) context.Context {
	t.Helper()
	var found string
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			found = path
			break
		}
	}
	if found == "" {
		t.Skip("no chromium or google-chrome: the page is not tried in a browser")
	}
	// It looks for nothing on the network by itself.
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(found), chromedp.NoSandbox,
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-component-update", true), chromedp.WindowSize(1000, 900))
	ctx, cancel := chromedp.NewExecAllocator(t.Context(), options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	ctx, cancel = context.WithTimeout(ctx, 5*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func (s *site) run(tab context.Context, actions ...chromedp.Action) {
	s.Helper()
	if err := chromedp.Run(tab, actions...); err != nil {
		s.Fatal(err)
	}
}

// Somebody looks a key up, pauses it, and is asked before it is done.
func TestSomebodyPausesAKey(t *testing.T) {
	pgtest.Long(t)
	s, tab := serve(t), browse(t)
	s.take(5, "alice")
	var asked, after string
	s.run(tab,
		chromedp.Navigate(s.url),
		chromedp.Click(`//a[text()="api"]`), chromedp.Click(`//a[text()="alice"]`),
		chromedp.SetValue(`input[name="for"]`, "1h"), chromedp.Click(`//button[@value="pause"]`),
		chromedp.WaitVisible(`//button[text()="Do it"]`), chromedp.Text(`main`, &asked),
		chromedp.Click(`//button[text()="Do it"]`), chromedp.WaitVisible(`.done`), chromedp.Text(`main`, &after),
	)
	if !strings.Contains(asked, "Empty alice of api") || !strings.Contains(after, "Done: pause.") || !strings.Contains(after, "refused: it is paused until") {
		t.Errorf("got %q and then %q", asked, after)
	}
}

// Enter in a field presses the button beside it.
func TestEnter(t *testing.T) {
	pgtest.Long(t)
	s, tab := serve(t), browse(t)
	s.take(5, "alice")
	s.edited(s.catalog.Set(t.Context(), "api", "alice", catalog.Override{Note: "n", Rate: 9}))
	for _, test := range []struct{ path, field, text, want string }{
		{"/key?name=api&key=alice", "tokens", "3", "Give 3 to alice of api"},
		{"/key?name=api&key=alice", "for", "1h", "Empty alice of api, and let nothing through for 1h"},
		{"/key?name=api&key=alice", "rate", "99", "rate 9, (n) → rate 99, (n)"},
		{"/key?name=api&key=alice", "count", "300", "never: "},
		{"/limit?name=api", "capacity", "50", "Change the override of all keys of api: none → capacity 50"},
		{"/limit?name=api", "key", "alice", "What would"},
		{"/limit?name=api", "prefix", "bob", "No such key has a row"},
		{"/permits?name=exports&key=org", "at-once", "7", "Change the override of org of exports: none → 7 at once"},
		{"/permits?name=exports", "lease", "2m", "Change the override of all keys of exports: none → lease 2m"},
	} {
		var shown string
		field := `input[name="` + test.field + `"]:not([type=hidden])`
		s.run(tab, chromedp.Navigate(s.url+test.path), chromedp.SetValue(field, test.text), chromedp.SendKeys(field, kb.Enter))
		for deadline := time.Now().Add(20 * time.Second); !strings.Contains(shown, test.want) && time.Now().Before(deadline); {
			if err := chromedp.Run(tab, chromedp.Text(`main`, &shown)); err != nil && tab.Err() != nil {
				t.Fatal(err) // and not because the page before has gone
			}
		}
		if !strings.Contains(shown, test.want) {
			t.Errorf("%s in %s: got %q, want %q", test.text, test.field, shown, test.want)
		}
	}
}

// busy fills the site with what people look at.
func (s *site) busy() {
	s.Helper()
	ctx := s.Context()
	s.take(25, "alice")
	s.take(5, "bob")
	s.take(1, "a customer with a long name, who is in the office of Llanfairpwllgwyngyll/team-7/production")
	_, err := s.store.Pause(ctx, api, "carol", 107*time.Hour+28*time.Minute)
	s.must(err)
	s.edited(s.catalog.Set(ctx, "api", "bob", catalog.Override{Rate: 100, Capacity: 40, Note: "moving house"}))
	s.edited(s.catalog.Set(ctx, "api", "bob", catalog.Override{Until: time.Now().Add(48 * time.Hour)}))
	s.edited(s.catalog.Set(ctx, "api", catalog.AllKeys, catalog.Override{MaxReserved: 40, Switch: catalog.Off}))
	s.edited(s.catalog.Set(ctx, "exports", "org 7", catalog.Override{AtOnce: 2, Note: "a large customer"}))
	for _, r := range []ratelimit.Request{monthly.ForN("acme", 999_999.5), monthly.ForN("other", 12), strict.ForN("alice", 80)} {
		s.must(s.store.Take(ctx, r))
	}
	for range 3 {
		_, err := s.store.Allow(ctx, api.ForN("alice", 5))
		s.must(err)
		_, err = s.store.Permits().Acquire(ctx, s.catalog.InFlight(exports, "org 7").For("org 7"))
		s.must(err)
	}
	s.must(s.refusals.Write(ctx))
	_, err = s.db.Pool.Exec(ctx, `INSERT INTO `+s.db.Schema+`.rate_limits VALUES ('api:start', 'alice', 0, 3, now()), ('an old limit', 'k', 0, 1, now())`)
	s.must(err)
}

// pages are all that the page has, by the names of their pictures.
var pages = []struct{ name, path string }{
	{"limits", "/"},
	{"limit", "/limit?name=api"},
	{"limit-monthly", "/limit?name=documents+per+month+and+customer"},
	{"limit-long", "/limit?name=" + long.Name},
	{"limited-now", "/limit?name=api&short=yes"},
	{"key", "/key?name=api&key=alice"},
	{"key-overridden", "/key?name=api&key=bob"},
	{"key-paused", "/key?name=api&key=carol"},
	{"key-monthly", "/key?name=documents+per+month+and+customer&key=acme"},
	{"key-sliding", "/key?name=strict&key=alice&count=90"},
	{"key-full", "/key?name=api&key=dora&count=21"},
	{"key-unlike", "/key?name=api&key=192.0.2.1"},
	{"permits", "/permits?name=exports"},
	{"permits-key", "/permits?name=exports&key=org+7"},
	{"refused", "/refused?since=1h"},
	{"changes", "/changes"},
	{"error", "/key?name=nothing&key=alice"},
	{"confirm", ""}, // posted
}

// overlaps is the first two texts of a page's pictures and rows that lie over each other.
const overlaps = `(() => {
	const all = [...document.querySelectorAll("th, dt, nav a, .at")].map(e => [e, e.getBoundingClientRect()]).filter(([, r]) => r.width > 0);
	for (const [a, p] of all) for (const [b, q] of all)
		if (a !== b && !a.contains(b) && !b.contains(a) && p.left + 1 < q.right && q.left + 1 < p.right && p.top + 1 < q.bottom && q.top + 1 < p.bottom) return a.innerText + " | " + b.innerText;
	return "" })()`

// All pages fit their windows, from a telephone's to a desk's, in two palettes; no label lies over
// another; and a form with a field has one button, which Enter presses.
func TestLooks(t *testing.T) {
	pgtest.Long(t)
	s, tab := serve(t), browse(t)
	s.busy()
	grounds := map[string]bool{}
	for _, p := range pages {
		s.run(tab, chromedp.Navigate(s.url+p.path))
		if p.path == "" {
			s.run(tab, chromedp.Navigate(s.url+"/limit?name=api"), chromedp.SetValue(`select[name="mode"]`, "refuse"),
				chromedp.Click(`button[value="set"]`), chromedp.WaitVisible(`.main`), chromedp.Poll(`document.readyState === "complete"`, nil)) // with its style
		}
		for _, palette := range []string{"light", "dark"} {
			for _, width := range []int64{360, 1024, 1440} {
				var ground, over string
				var wider, several int
				s.run(tab,
					emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: palette}}),
					chromedp.EmulateViewport(width, 900),
					chromedp.Evaluate(`getComputedStyle(document.body).backgroundColor`, &ground),
					chromedp.Evaluate(`Math.max(...[document.documentElement, ...document.querySelectorAll(".scroll")].map(e => e.scrollWidth - e.clientWidth))`, &wider),
					chromedp.Evaluate(overlaps, &over),
					chromedp.Evaluate(`[...document.forms].filter(f => f.querySelector("input:not([type=hidden])") && f.querySelectorAll("button").length !== 1).length`, &several),
				)
				grounds[palette+" "+ground] = true
				if wider > 0 || over != "" || several > 0 {
					t.Errorf("%s at %d: %d pixels wider than the window, texts over each other %q, %d forms with fields and not one button", p.name, width, wider, over, several)
				}
				if *pictures != "" {
					var shot []byte
					s.run(tab, chromedp.FullScreenshot(&shot, 100))
					s.must(os.WriteFile(filepath.Join(*pictures, fmt.Sprintf("%s-%d-%s.png", p.name, width, palette)), shot, 0o644))
				}
			}
		}
	}
	if len(grounds) != 2 {
		t.Errorf("got grounds %v, want one for each palette", grounds)
	}
	var shown string
	s.run(tab, chromedp.Navigate(s.url+"/limit?name=documents+per+month+and+customer"), chromedp.Evaluate(`document.querySelector("main").innerHTML`, &shown))
	if strings.Contains(shown, `name="period"`) || strings.Contains(shown, "Period") {
		t.Errorf("a quota by the month offers a period")
	}
}
