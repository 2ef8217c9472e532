package browser

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/console"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

var pictures = flag.String("pictures", "", "a directory to write pictures of the page to")

func TestMain(m *testing.M) { pgtest.Main(m) }

var api = ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Minute, Capacity: 20, MaxReserved: 30}

// site is the page on a database of the test's own, which may be changed.
type site struct {
	*testing.T
	store   *pgstore.Store
	catalog *catalog.Catalog
	url     string
}

func serve(t *testing.T) *site {
	t.Helper()
	db := pgtest.New(t, pgtest.With(migrations.Catalog))
	quiet := slog.New(slog.DiscardHandler)
	s := &site{T: t}
	var err error
	s.store, err = pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	s.must(err)
	s.catalog, err = catalog.New(db.Pool, &catalog.Config{Schema: db.Schema, Logger: quiet})
	s.must(err)
	s.must(s.catalog.Publish(t.Context(), api))
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
	ctx, cancel = context.WithTimeout(ctx, time.Minute)
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
	var why, asked, after string
	s.run(tab,
		chromedp.Navigate(s.url),
		chromedp.Click(`//a[text()="api"]`), chromedp.WaitVisible(`//a[text()="alice"]`),
		chromedp.Click(`//a[text()="alice"]`), chromedp.Text(`#why`, &why),
		chromedp.SetValue(`//button[@value="pause"]/ancestor::fieldset//input`, "1h"), chromedp.Click(`//button[@value="pause"]`),
		chromedp.WaitVisible(`//button[text()="Do it"]`), chromedp.Text(`main`, &asked),
	)
	if !regexp.MustCompile(`^granted: 1 would be taken of (1[5-9]|20)\b`).MatchString(why) || // with what was refilled
		!strings.Contains(asked, "Empty alice of api, and let nothing through for 1h0m0s") {
		t.Errorf("got %q and then %q", why, asked)
	}
	if result, err := s.store.Check(t.Context(), api.For("alice")); err != nil || !result.OK {
		t.Errorf("got %v, %v before it was confirmed", result, err)
	}
	s.run(tab, chromedp.Click(`//button[text()="Do it"]`), chromedp.WaitVisible(`.done`), chromedp.Text(`main`, &after))
	if !strings.Contains(after, "Done: pause.") || !strings.Contains(after, "refused: it is paused until") {
		t.Errorf("got %q", after)
	}
	if result, err := s.store.Check(t.Context(), api.For("alice")); err != nil || result.OK || result.PausedUntil.IsZero() {
		t.Errorf("got %v, %v after it was confirmed", result, err)
	}
}

// A key that is a script is shown, and does not run.
func TestKeysDoNotRun(t *testing.T) {
	pgtest.Long(t)
	s, tab := serve(t), browse(t)
	const key = `"><script>document.title = "taken over"</script><img src=x onerror="document.title = 'taken over'">`
	s.take(5, key)
	s.must(s.catalog.Set(t.Context(), "api", key, catalog.Override{Rate: 5, Note: key}))
	var shown string
	var titles []string
	for _, path := range []string{"/limit?name=api", "/changes"} {
		var title string
		s.run(tab, chromedp.Navigate(s.url+path), chromedp.Text(`main`, &shown), chromedp.Title(&title))
		titles = append(titles, title)
		if !strings.Contains(shown, "<script>") && !strings.Contains(shown, `<script`) {
			t.Errorf("%s does not show the key: %q", path, shown)
		}
	}
	if got := fmt.Sprint(titles); strings.Contains(got, "taken over") {
		t.Errorf("a key ran: %s", got)
	}
}

// The page of another site cannot change anything for somebody who has this page open, and
// cannot show it in a frame of its own.
func TestOtherSites(t *testing.T) {
	pgtest.Long(t)
	s, tab := serve(t), browse(t)
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, `<iframe src="%[1]s/" name="framed"></iframe>
<form method="post" action="%[1]s/change"><input name="name" value="api"><input name="key" value="alice">
<input name="action" value="pause"><input name="for" value="1h"><input name="confirmed" value="yes"><button>Win</button></form>`, s.url)
	}))
	t.Cleanup(other.Close)
	elsewhere := strings.Replace(other.URL, "127.0.0.1", "localhost", 1)
	var answer string
	var framed bool
	s.run(tab,
		chromedp.Navigate(elsewhere),
		chromedp.Evaluate(`(() => { try { return frames[0].document.body.innerText.includes("Limits") } catch { return frames[0].length > 0 } })()`, &framed),
		chromedp.Click(`button`), chromedp.WaitNotPresent(`button`), chromedp.Text(`body`, &answer),
	)
	if framed {
		t.Error("the page is shown in a frame of another site")
	}
	if !strings.Contains(answer, "cross-origin") {
		t.Errorf("a form of another site was answered %q", answer)
	}
	if result, err := s.store.Check(t.Context(), api.For("alice")); err != nil || !result.OK {
		t.Errorf("got %v, %v; want nothing changed", result, err)
	}
}

// The page fits narrow windows, and has two palettes.
func TestLooks(t *testing.T) {
	pgtest.Long(t)
	s, tab := serve(t), browse(t)
	s.take(25, "alice")
	s.take(5, "bob")
	_, err := s.store.Pause(t.Context(), api, "carol", time.Hour)
	s.must(err)
	s.must(s.catalog.Set(t.Context(), "api", "bob", catalog.Override{Rate: 100, Capacity: 40, Note: "moving house"}))
	grounds := map[string]string{}
	for _, palette := range []string{"light", "dark"} {
		var ground string
		var shot []byte
		s.run(tab,
			emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: palette}}),
			chromedp.EmulateViewport(1000, 900), chromedp.Navigate(s.url+"/key?name=api&key=alice"),
			chromedp.Evaluate(`getComputedStyle(document.body).backgroundColor`, &ground),
			chromedp.ActionFunc(func(ctx context.Context) (err error) {
				shot, err = page.CaptureScreenshot().WithFormat(page.CaptureScreenshotFormatPng).Do(ctx)
				return err
			}),
		)
		grounds[palette] = ground
		if *pictures != "" {
			s.must(os.WriteFile(filepath.Join(*pictures, "console-"+palette+".png"), shot, 0o644))
		}
	}
	if grounds["light"] == grounds["dark"] {
		t.Errorf("got the same ground %v in both palettes", grounds)
	}
	for _, path := range []string{"/", "/limit?name=api", "/key?name=api&key=alice", "/changes"} {
		var over int
		s.run(tab, chromedp.EmulateViewport(360, 800), chromedp.Navigate(s.url+path),
			chromedp.Evaluate(`document.documentElement.scrollWidth - document.documentElement.clientWidth`, &over))
		if over > 0 {
			t.Errorf("%s is %d pixels wider than a narrow window", path, over)
		}
	}
}
